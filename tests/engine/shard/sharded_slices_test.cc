// SPDX-License-Identifier: Apache-2.0
// Of a sharded model and its optimizer each rank writes its own rows into a checkpoint's folder,
// and reads the rows that it needs.
#include <filesystem>
#include <fstream>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/zero/zero.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>
#include <weft/tests/harness/sanitized.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace nn = torch::nn;
using torch::optim::AdamW;

// 5 rows and 1 row: shards of different sizes, and empty ones.
nn::Sequential uneven() { return nn::Sequential(nn::Linear(8, 5), nn::Linear(5, 1)); }

void step(const nn::Sequential& net, torch::optim::Optimizer& optimizer) {
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = parameter.detach() * 0.5;
  optimizer.step();
}

// All values of a model and of its optimizer as one rank without sharding has them.
std::vector<torch::Tensor> all_values(const nn::Sequential& net, const AdamW& optimizer) {
  auto values = copies(net->parameters());
  for (const auto& parameter : net->parameters()) {
    const auto& states = const_cast<AdamW&>(optimizer).state();
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *states.at(parameter.unsafeGetTensorImpl()));
    values.push_back(state.exp_avg().clone());
    values.push_back(state.exp_avg_sq().clone());
    values.push_back(torch::tensor(state.step()));
  }
  return values;
}

std::vector<torch::Tensor> expected_after(int steps) {
  auto net = uneven();
  fill_values(*net);
  AdamW optimizer(net->parameters());
  for (int i = 0; i < steps; ++i) step(net, optimizer);
  return all_values(net, optimizer);
}

class ShardedSlices : public ::testing::Test {
 protected:
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";

  // Saves a model that is sharded over `shards_over`, after two steps.
  void save(ProcessGroup& group, const ProcessGroup& shards_over) const {
    auto net = uneven();
    fill_values(*net);
    const FullyShardedDataParallel sharded(net, shards_over);
    AdamW optimizer(net->parameters());
    step(net, optimizer);
    step(net, optimizer);
    auto saving =
        checkpoint::save_async(folder_, group, {{"model", net}, {"optimizer", optimizer}});
    step(net, optimizer);  // training goes on
    saving.wait();
  }

  // Rows of a value in each rank's file, as "FIRST+COUNT".
  std::vector<std::string> rows_in_files(const std::string& name, int ranks) const {
    std::vector<std::string> rows;
    for (int rank = 0; rank < ranks; ++rank) {
      rows.emplace_back();
      const std::string file = "rank0000" + std::to_string(rank) + ".safetensors";
      for (const auto& saved : checkpoint::index_of(folder_ + "/1", file).slices) {
        if (saved.slice.name == name)
          rows.back() = std::to_string(saved.slice.offsets.front()) + "+" +
                        std::to_string(saved.slice.shape.front());
      }
    }
    return rows;
  }

  void expect_loads_plain(int ranks) const {
    run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
      auto net = uneven();
      AdamW optimizer(net->parameters());
      checkpoint::load(folder_, group, {{"model", net}, {"optimizer", optimizer}});
      EXPECT_TRUE(are_equal(all_values(net, optimizer), expected_after(2)));
    });
  }

  // The shards that are loaded train on like whole parameters.
  void expect_loads_sharded(int ranks) const {
    run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
      auto net = uneven();
      const FullyShardedDataParallel sharded(net, group);
      AdamW optimizer(net->parameters());
      checkpoint::load(folder_, group, {{"model", net}, {"optimizer", optimizer}});
      EXPECT_EQ(optimizer.state().size(), 4U);
      step(net, optimizer);
      auto expected = expected_after(3);
      expected.resize(4);
      EXPECT_TRUE(are_equal(whole(*net), expected));
    });
  }
};

// The optimizer lists the tied weight twice, and a parameter behind it. One has no elements.
struct TiedImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(4, 4));
  nn::Linear second = register_module("second", nn::Linear(4, 4));
  torch::Tensor none = register_parameter("none", torch::zeros({6, 0}));
  TiedImpl() { second->weight = second->named_parameters(false)["weight"] = first->weight; }
};

TEST_F(ShardedSlices, TiedWeightsAndParametersWithoutElementsComeBack) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto net = std::make_shared<TiedImpl>();
    fill_values(*net);
    const FullyShardedDataParallel sharded(net, group);
    AdamW optimizer(net->parameters());
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = parameter.detach() * 0.5;
    optimizer.step();
    checkpoint::save_async(folder_, group, {{"model", net}, {"optimizer", optimizer}}).wait();
    auto again = std::make_shared<TiedImpl>();
    AdamW loaded(again->parameters());
    checkpoint::load(folder_, group, {{"model", again}, {"optimizer", loaded}});
    EXPECT_TRUE(are_equal(copies(again->parameters()), whole(*net)));
    for (auto& parameter : again->parameters()) parameter.mutable_grad() = parameter.detach() * 0.5;
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = parameter.detach() * 0.5;
    loaded.step();
    optimizer.step();
    EXPECT_TRUE(are_equal(copies(again->parameters()), whole(*net)));
  });
}

TEST_F(ShardedSlices, EachRankWritesItsOwnRows) {
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) { save(group, group); });
  for (const std::string name : {"model.0.weight", "model.0.bias", "optimizer.state.0.exp_avg",
                                 "optimizer.state.1.exp_avg_sq"})
    EXPECT_THAT(rows_in_files(name, 4), ElementsAre("0+2", "2+2", "4+1", "")) << name;
  EXPECT_THAT(rows_in_files("model.1.weight", 4), ElementsAre("0+1", "", "", ""));
}

TEST_F(ShardedSlices, LoadEqualBitsOnAnyNumberOfRanks) {
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) { save(group, group); });
  for (const int ranks : {1, 3, 4}) {
    expect_loads_plain(ranks);
    expect_loads_sharded(ranks);
  }
}

TEST_F(ShardedSlices, ZeroAndDdpLoadThem) {
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) { save(group, group); });
  run_ranks(As::Threads, 3, [&](ProcessGroup& group) {
    auto net = uneven();
    const DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<AdamW> optimizer(net->parameters(), group,
                                             torch::optim::AdamWOptions());
    checkpoint::load(folder_, group, {{"model", net}, {"optimizer", optimizer}});
    step(net, optimizer);
    auto expected = expected_after(3);
    expected.resize(4);
    EXPECT_TRUE(are_equal(copies(net->parameters()), expected));
  });
}

TEST_F(ShardedSlices, ReplicasDivideEqualRows) {
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) {
    const auto pairs = std::vector<std::vector<int>>{{0, 1}, {2, 3}};
    const ProcessGroup first = group.new_group(pairs[0]);
    const ProcessGroup second = group.new_group(pairs[1]);
    save(group, group.rank() < 2 ? first : second);
  });
  EXPECT_THAT(rows_in_files("model.0.weight", 4), ElementsAre("0+2", "3+1", "2+1", "4+1"));
  EXPECT_THAT(rows_in_files("optimizer.state.0.exp_avg", 4),
              ElementsAre("0+2", "3+1", "2+1", "4+1"));
  EXPECT_THAT(rows_in_files("model.1.weight", 4), ElementsAre("0+1", "", "", ""));
  expect_loads_plain(1);
  expect_loads_sharded(3);
}

TEST_F(ShardedSlices, GroupWithoutAllRowsIsRefused) {
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) {
    const ProcessGroup even = group.new_group({0, 2});
    const ProcessGroup odd = group.new_group({1, 3});
    const ProcessGroup first = group.new_group({0, 1});
    const ProcessGroup last = group.new_group({2, 3});
    const int rank = group.rank();
    auto net = uneven();
    const FullyShardedDataParallel sharded(net, rank % 2 == 0 ? even : odd);
    const Error error = harness::error_of([&] {
      checkpoint::save_async(folder_ + std::to_string(rank / 2), rank < 2 ? first : last,
                             {{"model", net}})
          .wait();
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("'model.0.bias' is sharded over 2 ranks, and only some of "
                                        "its rows are on ranks of this group"));
  });
}

TEST_F(ShardedSlices, AnotherShapeChangesNothing) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    // Its whole parameters have the shapes of the shards below.
    auto half = nn::Sequential(nn::Linear(8, 2));
    checkpoint::save_async(folder_, group, {{"model", half}}).wait();
    auto net = nn::Sequential(nn::Linear(8, 4));
    fill_values(*net);
    const auto before = copies(net->parameters());
    const FullyShardedDataParallel sharded(net, group);
    const Error error = harness::error_of([&] {
      checkpoint::load(folder_, group, {{"model", net}});
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("does not fit on rank 0, and nothing was loaded: part 'model': "),
                      HasSubstr("is Float [2] in the file and Float [4] here")));
    EXPECT_TRUE(are_equal(whole(*net), before));
  });
}

// The value of /proc/self/status in bytes.
std::int64_t status_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) << 10;
  }
  return -1;
}

// The most memory that the process has had during the call, beyond what it had before.
std::int64_t peak_of(const std::function<void()>& call) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  const std::int64_t before = status_of("VmRSS");
  call();
  return status_of("VmHWM") - before;
}

TEST_F(ShardedSlices, NeedOneCopyOfTheShard) {
  if (harness::kSanitized) GTEST_SKIP() << "a sanitizer keeps memory of its own for each byte";
  constexpr std::int64_t kShard = 32 << 20;
  run_ranks(As::Processes, 2, [&](ProcessGroup& group) {
    auto net = nn::Sequential(nn::Linear(nn::LinearOptions(4096, 4096).bias(false)));
    const FullyShardedDataParallel sharded(net, group);
    const std::vector<checkpoint::Part> parts = {{"model", net}};
    int warm = 1;
    checkpoint::save_async(folder_, group, {{"warm", warm}}).wait();
    EXPECT_LT(peak_of([&] { checkpoint::save_async(folder_, group, parts).wait(); }),
              kShard * 3 / 2);
    EXPECT_LT(peak_of([&] { checkpoint::load(folder_, group, parts); }), kShard * 3 / 2);
  });
}

// Bytes that this thread has read by system calls.
std::int64_t bytes_read() {
  std::ifstream io("/proc/thread-self/io");
  std::string name;
  std::int64_t bytes = 0;
  io >> name >> bytes;
  return bytes;
}

TEST_F(ShardedSlices, EachRankReadsItsOwnRows) {
  constexpr std::int64_t kBytes = 512 * 1024 * 4;
  run_ranks(As::Threads, 4, [&](ProcessGroup& group) {
    auto net = nn::Sequential(nn::Linear(nn::LinearOptions(512, 1024).bias(false)));
    const FullyShardedDataParallel sharded(net, group);
    checkpoint::save_async(folder_, group, {{"model", net}}).wait();
    const std::int64_t before = bytes_read();
    checkpoint::load(folder_, group, {{"model", net}});
    EXPECT_GE(bytes_read() - before, kBytes / 4);
    EXPECT_LE(bytes_read() - before, kBytes / 2);
  });
}

}  // namespace
}  // namespace weft::testing
