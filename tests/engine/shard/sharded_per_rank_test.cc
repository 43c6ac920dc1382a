// SPDX-License-Identifier: Apache-2.0
// Checkpoint parts of sharded models that are per_rank().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
using ::testing::HasSubstr;
namespace nn = torch::nn;

TEST(ShardedPerRankParts, AreLoadedByAsManyRanksAsHaveSaved) {
  const harness::Folder folder;
  const std::string path = folder.path();
  for (const int ranks : {2, 2, 3, 1}) {
    run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
      auto net = blocks(1);
      FullyShardedDataParallel sharded(net, group);
      torch::optim::AdamW optimizer(net->parameters());
      sharded(torch::ones({4, 8})).sum().backward();
      optimizer.step();
      for (const bool is_optimizer : {true, false}) {
        const std::vector<checkpoint::Part> parts = {
            is_optimizer ? checkpoint::Part("own", checkpoint::per_rank(optimizer))
                         : checkpoint::Part("own", checkpoint::per_rank(net))};
        const std::string place = path + (is_optimizer ? "/optimizer" : "/model");
        if (!checkpoint::exists(place, group)) checkpoint::save_async(place, group, parts).wait();
        harness::meet(group);
        if (ranks == 2) {
          checkpoint::load(place, group, parts);
          continue;
        }
        const Error error = error_of([&] { checkpoint::load(place, group, parts); });
        EXPECT_EQ(error.blame(), Blame::Caller);
        EXPECT_THAT(error.text(), HasSubstr("part 'own' is per_rank() and belongs to a sharded"));
      }
    });
  }
}

}  // namespace
}  // namespace weft::testing
