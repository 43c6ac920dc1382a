// SPDX-License-Identifier: Apache-2.0
// Ranks that make different calls. Over Weft's own transports each message says which call it
// belongs to, so both ranks get a Caller error at once, without any environment variable.
#include <chrono>
#include <latch>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Call = std::function<void(ProcessGroup& group)>;

class Mismatch : public testing::TestWithParam<const char*> {
 protected:
  // Rank 0 makes one call and rank 1 the other; both are refused long before the timeout.
  static void expect_refused(const char* what, const Call& first, const Call& second) {
    harness::run_ranks(
        As::Threads, 2,
        [&](ProcessGroup& group) {
          const auto start = std::chrono::steady_clock::now();
          const Error error = error_of([&] {
            (group.rank() == 0 ? first : second)(group);
            for (int more = 0; more < 2; ++more)
              group.all_reduce(torch::ones({3}, at::kDouble)).wait();
          });
          EXPECT_EQ(error.blame(), Blame::Caller)
              << what << ", rank " << group.rank() << ": " << error.what();
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << what;
        },
        {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(, Mismatch, testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

at::Tensor ones(std::int64_t count = 4, at::ScalarType dtype = at::kFloat) {
  return torch::ones({count}, dtype);
}

TEST_P(Mismatch, OfEmptyAndFullTensorsIsRefused) {
  expect_refused(
      "all_reduce", [](auto& group) { group.all_reduce(ones(0)).wait(); },
      [](auto& group) { group.all_reduce(ones(1)).wait(); });
  expect_refused(
      "broadcast", [](auto& group) { group.broadcast(ones(0), 0).wait(); },
      [](auto& group) { group.broadcast(ones(1), 0).wait(); });
  expect_refused(
      "all_gather_into", [](auto& group) { group.all_gather_into(ones(0), ones(0)).wait(); },
      [](auto& group) { group.all_gather_into(ones(2), ones(1)).wait(); });
}

TEST_P(Mismatch, OfAnyPartOfACallIsRefused) {
  const Call right = [](auto& group) { group.all_reduce(ones()).wait(); };
  expect_refused("another dtype", right,
                 [](auto& group) { group.all_reduce(ones(4, at::kInt)).wait(); });
  expect_refused("another number of elements", right,
                 [](auto& group) { group.all_reduce(ones(5)).wait(); });
  expect_refused("another operator", right,
                 [](auto& group) { group.all_reduce(ones(), ReduceOp::Max).wait(); });
  expect_refused("another call", right, [](auto& group) { group.broadcast(ones(), 1).wait(); });
  expect_refused("a barrier", right, [](auto& group) { group.barrier().wait(); });
  expect_refused(
      "another root", [](auto& group) { group.broadcast(ones(), 0).wait(); },
      [](auto& group) { group.broadcast(ones(), 1).wait(); });
  expect_refused(
      "other parts",
      [](auto& group) {
        group.all_to_all({ones(1), ones(2)}, {ones(1), ones(2)}).wait();
      },
      [](auto& group) {
        group.all_to_all({ones(3), ones(1)}, {ones(3), ones(1)}).wait();
      });
}

TEST_P(Mismatch, OfMessageDtypesIsRefused) {
  for (const std::int64_t count : {std::int64_t{4}, std::int64_t{1} << 20}) {
    for (const bool receive_first : {true, false}) {
      const Call send = [=](auto& group) {
        if (receive_first) group.recv(ones(1), 1, 7).wait();
        group.send(ones(count), 1).wait();
      };
      const Call receive = [=](auto& group) {
        Work work;
        if (receive_first) work = group.recv(ones(count, at::kInt), 0);
        if (receive_first) group.send(ones(1), 0, 7).wait();
        if (!receive_first) work = group.recv(ones(count, at::kInt), 0);
        work.wait();
      };
      expect_refused("a message", send, receive);
    }
  }
}

// A root that only sends has ended its part before another rank refuses the call. It must learn
// that reason, not that the other rank has left.
TEST_P(Mismatch, ReachesARankThatHasFinished) {
  std::latch has_left(1);
  harness::run_ranks(As::Threads, 2,
                     [&](ProcessGroup& group) {
                       Error error(Blame::Remote, "");
                       if (group.rank() == 0) {
                         error = error_of([&] {
                           group.broadcast(ones(), 0).wait();
                           has_left.wait();
                           group.all_reduce(ones()).wait();
                         });
                       } else {
                         error = error_of([&] { group.all_reduce(ones()).wait(); });
                         group.leave(std::chrono::seconds(20));
                         has_left.count_down();
                       }
                       EXPECT_EQ(error.blame(), Blame::Caller)
                           << "rank " << group.rank() << ": " << error.what();
                       EXPECT_THAT(error.text(), HasSubstr("broadcast of 4 elements of float32"));
                     },
                     {.backend = GetParam()});
}

// Collectives of empty tensors exchange messages too, and are not refused.
TEST_P(Mismatch, AllowsTensorsEmptyOnAllRanks) {
  harness::run_ranks(
      As::Threads, 3,
      [](ProcessGroup& group) {
        group.all_reduce(ones(0)).wait();
        group.reduce(ones(0), 1).wait();
        group.broadcast(ones(0), 2).wait();
        group.all_gather(Tensors(3, ones(0)), ones(0)).wait();
        group.gather(group.rank() == 1 ? Tensors(3, ones(0)) : Tensors(), ones(0), 1).wait();
        group.scatter(ones(0), group.rank() == 1 ? Tensors(3, ones(0)) : Tensors(), 1).wait();
        group.reduce_scatter(ones(0), Tensors(3, ones(0))).wait();
        group.reduce_scatter_into(ones(0), ones(0)).wait();
        const auto one = ones(1);
        group.all_reduce(one).wait();
        EXPECT_EQ(one.item<float>(), 3);
      },
      {.backend = GetParam()});
}

}  // namespace
}  // namespace weft
