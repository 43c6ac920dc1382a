// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/ddp/bucket_plan.h>
#include <weft/error.h>

namespace weft::parallel {
namespace {

using ::testing::ElementsAre;

PlannedGradient floats(std::size_t count, at::ScalarType dtype = at::kFloat, bool sparse = false) {
  return {count * (dtype == at::kDouble ? 8 : 4), dtype, c10::Device(c10::kCPU), sparse};
}

std::vector<std::vector<std::size_t>> plan(const std::vector<PlannedGradient>& gradients,
                                           std::vector<std::size_t> order,
                                           std::vector<std::size_t> limits) {
  std::vector<std::vector<std::size_t>> result;
  for (const auto& bucket : plan_buckets(gradients, order, limits))
    result.push_back(bucket.gradients);
  return result;
}

TEST(PlanBuckets, FullGradientGetsItsOwnBucket) {
  EXPECT_THAT(plan({floats(100), floats(100), floats(100), floats(100)}, {0, 1, 2, 3}, {400}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2), ElementsAre(3)));
}

TEST(PlanBuckets, BucketHoldsOneDtypeOnly) {
  const auto f = floats(50);
  const auto d = floats(25, at::kDouble);
  EXPECT_THAT(plan({f, d, f, d, f, d}, {0, 1, 2, 3, 4, 5}, {400}),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3), ElementsAre(4), ElementsAre(5)));
}

TEST(PlanBuckets, FirstLimitAppliesToEachKind) {
  const auto f = floats(10);
  const auto d = floats(5, at::kDouble);
  EXPECT_THAT(plan({f, d, f, d, f, d}, {0, 1, 2, 3, 4, 5}, {40, 80}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2, 4), ElementsAre(3, 5)));
}

TEST(PlanBuckets, ReportsTheLimitOfEachBucket) {
  const auto buckets =
      plan_buckets(std::vector<PlannedGradient>{floats(10), floats(10), floats(10)},
                   std::vector<std::size_t>{0, 1, 2}, std::vector<std::size_t>{40, 80});
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[0].limit, 40u);
  EXPECT_EQ(buckets[1].limit, 80u);
}

TEST(PlanBuckets, FollowsTheOrder) {
  EXPECT_THAT(plan({floats(10), floats(10), floats(10)}, {2, 0, 1}, {80}),
              ElementsAre(ElementsAre(2, 0), ElementsAre(1)));
}

TEST(PlanBuckets, LastGradientOrdersBuckets) {
  const auto f = floats(10);
  const auto d = floats(5, at::kDouble);
  // The bucket of doubles begins first and ends last.
  EXPECT_THAT(plan({d, f, f, d}, {0, 1, 2, 3}, {80}),
              ElementsAre(ElementsAre(1, 2), ElementsAre(0, 3)));
}

TEST(PlanBuckets, SparseGradientTravelsAlone) {
  EXPECT_THAT(plan({floats(10), floats(10, at::kFloat, true), floats(10)}, {0, 1, 2}, {1000}),
              ElementsAre(ElementsAre(1), ElementsAre(0, 2)));
}

TEST(PlanBuckets, RefusesBadOrdersAndLimits) {
  const auto blame = [](const std::vector<std::size_t>& order,
                        const std::vector<std::size_t>& limits) {
    try {
      plan({floats(1), floats(1)}, order, limits);
    } catch (const Error& error) {
      return error.blame() == Blame::Caller;
    }
    return false;
  };
  EXPECT_TRUE(blame({0, 0}, {4}));
  EXPECT_TRUE(blame({0, 2}, {4}));
  EXPECT_TRUE(blame({0}, {4}));
  EXPECT_TRUE(blame({0, 1}, {4, 0}));
  EXPECT_TRUE(blame({0, 1}, {}));
}

}  // namespace
}  // namespace weft::parallel
