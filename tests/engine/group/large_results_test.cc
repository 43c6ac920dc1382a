// SPDX-License-Identifier: Apache-2.0
// Results that are larger than the processor's caches, which are copied past them
// (base/large_copy.h).
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <weft/base/large_copy.h>
#include <weft/engine/group/process_group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;

// Not a whole number of cache lines.
constexpr auto kElements = static_cast<std::int64_t>(kLargeCopyBytes / sizeof(float) + 12345);

// Small numbers, different on each rank and at neighbouring places: sums of them are exact.
at::Tensor values(int rank, std::int64_t elements = kElements) {
  return at::arange(elements, at::kInt).remainder(251).to(at::kFloat) +
         static_cast<double>(1000 * rank);
}

class LargeResults : public testing::TestWithParam<const char*> {
 protected:
  static void run(int ranks, const std::function<void(ProcessGroup&)>& body) {
    harness::run_ranks(As::Threads, ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(, LargeResults, testing::Values("shm", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(LargeResults, OfCollectivesAreWhole) {
  for (const int ranks : {2, 3}) {
    run(ranks, [ranks](ProcessGroup& group) {
      const int rank = group.rank();
      at::Tensor all = at::zeros({ranks * kElements});
      group.all_gather_into(all, values(rank)).wait();
      at::Tensor sum = values(rank);
      group.all_reduce(sum).wait();
      at::Tensor from_last = values(rank);
      group.broadcast(from_last, ranks - 1).wait();
      at::Tensor expected_sum = at::zeros({kElements});
      for (int other = 0; other < ranks; ++other) {
        expected_sum += values(other);
        EXPECT_TRUE(all.narrow(0, other * kElements, kElements).equal(values(other)));
      }
      EXPECT_TRUE(sum.equal(expected_sum));
      EXPECT_TRUE(from_last.equal(values(ranks - 1)));

      at::Tensor parts = at::zeros({ranks * kElements});
      group.all_to_all_single(parts, values(rank, ranks * kElements)).wait();
      at::Tensor mine = at::zeros({kElements});
      group.reduce_scatter_into(mine, values(rank, ranks * kElements)).wait();
      at::Tensor expected_mine = at::zeros({kElements});
      for (int other = 0; other < ranks; ++other) {
        const at::Tensor part =
            values(other, ranks * kElements).narrow(0, rank * kElements, kElements);
        EXPECT_TRUE(parts.narrow(0, other * kElements, kElements).equal(part));
        expected_mine += part;
      }
      EXPECT_TRUE(mine.equal(expected_mine));
    });
  }
}

TEST_P(LargeResults, OfMessagesAreWhole) {
  run(2, [](ProcessGroup& group) {
    const int rank = group.rank();
    at::Tensor received = at::zeros({2 * kElements});
    // Behind the first element, so that source and destination lie differently in their lines.
    const at::Tensor place = received.narrow(0, 1, kElements);
    Work sent = group.send(values(rank), 1 - rank);
    group.recv(place, 1 - rank).wait();
    sent.wait();
    EXPECT_TRUE(place.equal(values(1 - rank)));
    EXPECT_EQ(received[0].item<float>(), 0);
    EXPECT_EQ(received[kElements + 1].item<float>(), 0);
  });
}

}  // namespace
}  // namespace weft
