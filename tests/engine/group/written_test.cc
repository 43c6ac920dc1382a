// SPDX-License-Identifier: Apache-2.0
// A call tells autograd which tensors it writes, and refuses outputs that share memory with its
// other tensors.
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/base/log.h>
#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

class Written : public testing::TestWithParam<const char*> {
 protected:
  static void on_two_ranks(const harness::Body& body) {
    harness::run_ranks(As::Threads, 2, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(, Written, testing::Values("gloo", "shm", "tcp"),
                         [](const auto& info) { return info.param; });

at::Tensor ones(std::int64_t count = 2) { return torch::ones({count}); }

struct Call {
  const char* name;
  std::function<void(ProcessGroup& group, at::Tensor& writes, at::Tensor& reads)> run;
  bool by_rank_1_only = false;  // only the call of rank 1 writes
};

std::vector<Call> calls() {
  return {
      {"all_reduce", [](auto& group, auto& writes, auto&) { group.all_reduce(writes).wait(); }},
      {"broadcast", [](auto& group, auto& writes, auto&) { group.broadcast(writes, 0).wait(); },
       true},
      {"reduce", [](auto& group, auto& writes, auto&) { group.reduce(writes, 1).wait(); }, true},
      {"all_gather",
       [](auto& group, auto& writes, auto& reads) {
         group.all_gather({writes, torch::zeros({2})}, reads).wait();
       }},
      {"all_gather_into",
       [](auto& group, auto& writes, auto& reads) {
         group.all_gather_into(writes, reads.narrow(0, 0, 1)).wait();
       }},
      {"gather",
       [](auto& group, auto& writes, auto& reads) {
         group.gather(group.rank() == 1 ? Tensors{writes, torch::zeros({2})} : Tensors{}, reads, 1)
             .wait();
       },
       true},
      {"scatter",
       [](auto& group, auto& writes, auto& reads) {
         group.scatter(writes, group.rank() == 0 ? Tensors{reads, reads} : Tensors{}, 0).wait();
       }},
      {"reduce_scatter",
       [](auto& group, auto& writes, auto& reads) {
         group.reduce_scatter(writes, {reads, reads}).wait();
       }},
      {"reduce_scatter_into",
       [](auto& group, auto& writes, auto& reads) {
         group.reduce_scatter_into(writes.narrow(0, 0, 1), reads).wait();
       }},
      {"all_to_all",
       [](auto& group, auto& writes, auto& reads) {
         group.all_to_all({writes, torch::zeros({2})}, {reads, reads}).wait();
       }},
      {"send and recv",
       [](auto& group, auto& writes, auto& reads) {
         if (group.rank() == 0) return group.send(reads, 1).wait();
         group.recv(writes, 0).wait();
       },
       true},
  };
}

TEST_P(Written, ChangedSavedTensorFailsBackward) {
  on_two_ranks([](ProcessGroup& group) {
    for (const Call& call : calls()) {
      auto weight = torch::full({1}, 2.0, torch::requires_grad());
      auto writes = ones();
      auto reads = ones();
      const auto through_written = (weight * writes).sum();
      const auto through_read = (weight * reads).sum();
      call.run(group, writes, reads);
      EXPECT_NO_THROW(through_read.backward()) << call.name << " does not write what it sends";
      if (call.by_rank_1_only && group.rank() == 0) {
        EXPECT_NO_THROW(through_written.backward()) << call.name;
        continue;
      }
      try {
        through_written.backward();
        ADD_FAILURE() << call.name << ": backward computed with values that had changed";
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation")) << call.name;
      }
    }
  });
}

TEST_P(Written, ComplexOutputsAreMarkedWritten) {
  on_two_ranks([](ProcessGroup& group) {
    auto weight = torch::full({1}, 2.0, torch::requires_grad());
    const auto output = torch::zeros({4}, at::kComplexFloat);
    const auto saved = at::real((weight * output).sum());
    group.all_gather_into(output, torch::ones({2}, at::kComplexFloat)).wait();
    EXPECT_THROW(saved.backward(), c10::Error);
    at::Tensor untracked;
    {
      const c10::InferenceMode inference;
      untracked = torch::ones({2});
    }
    group.all_reduce(untracked).wait();
    EXPECT_EQ(untracked[1].item<float>(), 2);
  });
}

TEST_P(Written, OverlappingOutputsAreRefused) {
  on_two_ranks([](ProcessGroup& group) {
    const at::Tensor four = ones(4);
    const auto from = [&](std::int64_t begin) { return four.narrow(0, begin, 2); };
    const auto half = [&](std::int64_t rank) { return from(2 * rank); };
    const int other = 1 - group.rank();
    const std::vector<std::pair<std::string, std::function<void()>>> wrong{
        {"all_gather: outputs[0] and outputs[1] share memory",
         [&] {
           group.all_gather({from(0), from(0)}, ones()).wait();
         }},
        {"all_gather: outputs[0] and outputs[1] share memory",
         [&] {
           group.all_gather({from(0), from(1)}, ones()).wait();
         }},
        {"share memory",
         [&] {
           group.all_gather({half(0), half(1)}, half(other)).wait();
         }},
        {"share memory",
         [&] {
           group.all_gather({half(0), half(1)}, from(1)).wait();
         }},
        {"all_gather_into: ", [&] { group.all_gather_into(four, half(other)).wait(); }},
        {"gather: ",
         [&] {
           group.gather({from(0), from(1)}, ones(), group.rank()).wait();
         }},
        {"scatter: ",
         [&] {
           group.scatter(half(other), {half(0), half(1)}, group.rank()).wait();
         }},
        {"reduce_scatter: ",
         [&] {
           group.reduce_scatter(half(other), {half(0), half(1)}).wait();
         }},
        {"reduce_scatter_into: ", [&] { group.reduce_scatter_into(half(other), four).wait(); }},
        {"all_to_all: outputs[0] and outputs[1]",
         [&] {
           group.all_to_all({from(0), from(0)}, {ones(), ones()}).wait();
         }},
        {"all_to_all: ",
         [&] {
           group.all_to_all({half(0), half(1)}, {half(0), half(1)}).wait();
         }},
    };
    for (const auto& [text, call] : wrong) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(text));
    }
  });
}

TEST_P(Written, OwnPartMayBeInPlace) {
  on_two_ranks([](ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    const auto fresh = [&] {
      at::Tensor four = torch::zeros({4});
      four.narrow(0, 2 * group.rank(), 2).fill_(group.rank() + 1);
      return four;
    };
    const at::Tensor expected = torch::tensor({1.0F, 1.0F, 2.0F, 2.0F});
    at::Tensor four = fresh();
    group.all_gather_into(four, four.chunk(2)[rank]).wait();
    EXPECT_TRUE(torch::equal(four, expected));
    four = fresh();
    group.all_gather(four.chunk(2), four.chunk(2)[rank]).wait();
    EXPECT_TRUE(torch::equal(four, expected));
    four = ones(4);
    group.reduce_scatter_into(four.chunk(2)[rank], four).wait();
    EXPECT_EQ(four.chunk(2)[rank][0].item<float>(), 2);
    const at::Tensor same = ones();
    const at::Tensor output = torch::zeros({2});
    group.reduce_scatter(output, {same, same}).wait();  // the inputs may be one tensor
    EXPECT_EQ(output[1].item<float>(), 2);
  });
}

// The loss is reduced before its backward, in which autograd knows nothing of the other ranks.
TEST(BackwardThrough, ReducedLossIsWarnedOfOnce) {
  std::mutex mutex;
  std::string log;
  const log::Capture capture([&](LogLevel level, std::string_view line) {
    std::lock_guard lock(mutex);
    if (level == LogLevel::Warn) log.append(line).append("\n");
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = init_process_group(
          {.rank = rank, .world_size = 2, .store = store, .device = c10::Device(c10::kCPU)});
      const auto weight = torch::ones({1}).requires_grad_();
      for (const bool before : {false, true}) {
        const auto loss = (weight * 2).sum();
        if (!before) loss.backward();
        group.all_reduce(loss).wait();
        group.barrier().wait();
        if (rank == 0) {
          std::lock_guard lock(mutex);
          EXPECT_EQ(log, "")
              << "a loss reduced for a report, and one whose backward is still to come";
        }
        group.barrier().wait();
        if (before) loss.backward();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const auto first =
      log.find("a backward passes through a tensor that all_reduce #4 has overwritten");
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("a backward passes through", first + 1), std::string::npos) << log;
}

}  // namespace
}  // namespace weft
