// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/engine/shard/gather_order.h>
#include <weft/engine/shard/rows.h>

namespace weft::shard {
namespace {

using Units = std::vector<std::size_t>;

void run(GatherOrder& order, const Units& units) {
  order.begin();
  for (const std::size_t unit : units) order.step(unit);
}

TEST(GatherOrder, PredictsNothingInTheFirstPass) {
  GatherOrder order;
  order.begin();
  EXPECT_TRUE(order.step(0));
  EXPECT_TRUE(order.next(2).empty());
}

TEST(GatherOrder, PredictsTheNextUnitsOfThePassBefore) {
  GatherOrder order;
  run(order, {0, 1, 2, 3});
  order.begin();
  EXPECT_EQ(order.next(1), Units{0});
  EXPECT_TRUE(order.step(0));
  EXPECT_EQ(order.next(2), (Units{1, 2}));
  EXPECT_TRUE(order.step(1));
  EXPECT_TRUE(order.step(2));
  EXPECT_EQ(order.next(2), Units{3});
}

TEST(GatherOrder, SkipsRepetitions) {
  GatherOrder order;
  run(order, {0, 1, 0, 1, 2});
  order.begin();
  order.step(0);
  EXPECT_EQ(order.next(2), (Units{1, 2}));
}

TEST(GatherOrder, FollowsAChange) {
  GatherOrder order;
  run(order, {0, 1, 2, 3});
  order.begin();
  order.step(0);
  EXPECT_FALSE(order.step(2));
  EXPECT_EQ(order.next(1), Units{3});
  EXPECT_TRUE(order.step(3));
  order.begin();  // the changed pass is the record now
  EXPECT_TRUE(order.step(0));
  EXPECT_EQ(order.next(1), Units{2});
}

TEST(GatherOrder, KeepsItsRecordOverAnEmptyPass) {
  GatherOrder order;
  run(order, {0, 1});
  order.begin();
  order.begin();
  EXPECT_EQ(order.next(1), Units{0});
}

TEST(Rows, AreSpreadInEqualPartsFromTheFirstRank) {
  EXPECT_EQ(rows_of(5, 0, 2).count, 3);
  EXPECT_EQ(rows_of(5, 1, 2).first, 3);
  EXPECT_EQ(rows_of(5, 1, 2).count, 2);
  EXPECT_EQ(rows_of(1, 2, 3).count, 0);
  EXPECT_EQ(rows_of(4, 3, 3).count, 0);
  EXPECT_EQ(rows_of(0, 1, 2).count, 0);
}

}  // namespace
}  // namespace weft::shard
