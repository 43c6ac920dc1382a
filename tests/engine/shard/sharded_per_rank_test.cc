// SPDX-License-Identifier: Apache-2.0
// Checkpoint parts of sharded models that are per_rank().
#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>

#include "two_ranks.h"

namespace weft::testing {
namespace {

TEST(ShardedPerRankParts, AreLoadedByAsManyRanksAsHaveSaved) {
  const harness::Folder folder;
  const std::string path = folder.path();
  for (const int ranks : {2, 2, 3, 1}) {
    harness::run_ranks(harness::As::Threads, ranks, [&](ProcessGroup& group) {
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
