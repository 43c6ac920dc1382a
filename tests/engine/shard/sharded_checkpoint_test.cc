// SPDX-License-Identifier: Apache-2.0
// Checkpoints of sharded models are those of whole ones.
#include <filesystem>

#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/mesh.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// 5 rows and 1 row: shards of different sizes, and an empty one.
nn::Sequential uneven() { return nn::Sequential(nn::Linear(8, 5), nn::Linear(5, 1)); }

template <class Forward>
void train(Forward& forward, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    forward(numbers({4, 8}, static_cast<std::uint64_t>(step))).square().mean().backward();
    optimizer.step();
  }
}

struct Plain {
  nn::Sequential net;
  torch::Tensor operator()(const torch::Tensor& x) { return net->forward(x); }
};

// Each test saves and loads a file, and a folder of all ranks.
class ShardedCheckpoints : public ::testing::TestWithParam<const char*> {
 protected:
  std::string path() const { return (std::filesystem::path(folder_.path()) / GetParam()).string(); }
  void save(ProcessGroup& group, const std::vector<checkpoint::Part>& parts) const {
    if (std::string(GetParam()) == "file") return checkpoint::save(path(), group, parts);
    checkpoint::save_async(path(), group, parts).wait();
  }

 private:
  const harness::Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(, ShardedCheckpoints, ::testing::Values("file", "folder"),
                         [](const auto& info) { return info.param; });

TEST_P(ShardedCheckpoints, AWholeModelLoadsWhatShardsHaveSaved) {
  std::vector<torch::Tensor> expected;
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto net = uneven();
    fill_values(*net);
    FullyShardedDataParallel sharded(net, group);
    torch::optim::AdamW optimizer(net->parameters());
    train(sharded, optimizer, 3);
    save(group, {{"model", net}, {"optimizer", optimizer}});
    train(sharded, optimizer, 3);
    const auto all = whole(*net);
    if (group.rank() == 0) expected = all;
  });
  run_ranks(As::Threads, 1, [&](ProcessGroup& group) {
    auto net = uneven();
    torch::optim::AdamW optimizer(net->parameters());
    checkpoint::load(path(), group, {{"model", net}, {"optimizer", optimizer}});
    Plain plain{net};
    train(plain, optimizer, 3);
    EXPECT_TRUE(are_equal(copies(net->parameters()), expected));
  });
}

TEST_P(ShardedCheckpoints, ShardsOnAnyNumberOfRanksLoadAWholeModel) {
  std::vector<torch::Tensor> expected;
  run_ranks(As::Threads, 1, [&](ProcessGroup& group) {
    auto net = uneven();
    fill_values(*net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    Plain plain{net};
    train(plain, optimizer, 3);
    save(group, {{"model", net}, {"optimizer", optimizer}});
    train(plain, optimizer, 3);
    expected = copies(net->parameters());
  });
  for (const int ranks : {2, 3}) {
    run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
      auto net = uneven();
      FullyShardedDataParallel sharded(net, group);
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      checkpoint::load(path(), group, {{"model", net}, {"optimizer", optimizer}});
      EXPECT_EQ(optimizer.state().size(), 4U);
      train(sharded, optimizer, 3);
      const auto mine = whole(*net);
      for (std::size_t i = 0; i < mine.size(); ++i)
        EXPECT_TRUE(torch::allclose(mine[i], expected[i], 1e-5, 1e-7));
    });
  }
}

TEST_P(ShardedCheckpoints, AMeshLoadsWhatAnotherMeshHasSaved) {
  std::vector<torch::Tensor> expected;
  for (const int first : {2, 4, 1}) {
    run_ranks(As::Threads, 4, [&](ProcessGroup& group) {
      auto net = uneven();
      fill_values(*net);
      FullyShardedDataParallel sharded(net, Mesh(group, {{"copies", first}, {"rows", -1}}));
      torch::optim::AdamW optimizer(net->parameters());
      const bool saves = first == 2;
      if (saves) {
        train(sharded, optimizer, 3);
        save(group, {{"model", net}, {"optimizer", optimizer}});
      } else {
        checkpoint::load(path(), group, {{"model", net}, {"optimizer", optimizer}});
      }
      train(sharded, optimizer, 3);
      const auto mine = whole(*net);
      if (saves && group.rank() == 0) expected = mine;
      for (std::size_t i = 0; i < mine.size() && !saves; ++i)
        EXPECT_TRUE(torch::allclose(mine[i], expected[i], 1e-5, 1e-7));
    });
  }
}

TEST_P(ShardedCheckpoints, TrainingGoesOnAfterASave) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    std::vector<std::vector<torch::Tensor>> results;
    for (const bool saves : {false, true}) {
      auto net = uneven();
      fill_values(*net);
      FullyShardedDataParallel sharded(net, group);
      torch::optim::AdamW optimizer(net->parameters());
      train(sharded, optimizer, 2);
      if (saves) save(group, {{"model", net}, {"optimizer", optimizer}});
      train(sharded, optimizer, 2);
      results.push_back(whole(*net));
    }
    EXPECT_TRUE(are_equal(results[0], results[1]));
  });
}

TEST_P(ShardedCheckpoints, AFileThatDoesNotFitChangesNothing) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto other = blocks(1);
    save(group, {{"model", other}});
    auto net = uneven();
    fill_values(*net);
    const auto before = copies(net->parameters());
    FullyShardedDataParallel sharded(net, group);
    EXPECT_THROW(checkpoint::load(path(), group, {{"model", net}}), Error);
    EXPECT_TRUE(are_equal(whole(*net), before));
  });
}

}  // namespace
}  // namespace weft::testing
