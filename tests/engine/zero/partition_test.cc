// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/zero/partition.h>

namespace weft::parallel {
namespace {

using ::testing::ElementsAre;

TEST(Partition, LargestGoesToTheLeastLoaded) {
  std::vector<std::size_t> loads(2);
  const std::size_t sizes[] = {5, 1, 4, 2, 3};
  EXPECT_THAT(deal_balanced(sizes, loads), ElementsAre(0, 0, 1, 0, 1));
  EXPECT_THAT(loads, ElementsAre(8, 7));
}

TEST(Partition, EarlierLoadsCount) {
  std::vector<std::size_t> loads{10, 0, 9};
  const std::size_t sizes[] = {1, 8};
  EXPECT_THAT(deal_balanced(sizes, loads), ElementsAre(1, 1));
  EXPECT_THAT(loads, ElementsAre(10, 9, 9));
}

TEST(Partition, LoadsStayNearTheEvenShare) {
  std::mt19937 random(1);
  for (int run = 0; run < 200; ++run) {
    std::vector<std::size_t> loads(1 + random() % 8);
    std::vector<std::size_t> sizes(random() % 50);
    for (std::size_t& size : sizes) size = random() % 1000;
    const auto ranks = deal_balanced(sizes, loads);
    ASSERT_EQ(ranks.size(), sizes.size());
    std::vector<std::size_t> counted(loads.size());
    for (std::size_t i = 0; i < sizes.size(); ++i)
      counted.at(static_cast<std::size_t>(ranks[i])) += sizes[i];
    EXPECT_EQ(counted, loads);
    const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t(0));
    const std::size_t largest = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
    for (const std::size_t load : loads) EXPECT_LE(load, total / loads.size() + largest);
  }
}

}  // namespace
}  // namespace weft::parallel
