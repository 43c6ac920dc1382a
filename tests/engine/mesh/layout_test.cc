// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/mesh/layout.h>
#include <weft/tests/harness/ranks.h>

namespace weft::mesh {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Axes = std::vector<MeshAxis>;

Error refusal(const Axes& axes, int ranks) {
  return harness::error_of([&] { static_cast<void>(Layout(axes, ranks)); });
}

void expect_refused(const Axes& axes, int ranks, const std::string& why) {
  const Error error = refusal(axes, ranks);
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr(why));
}

TEST(Layout, NumbersRanksRowByRow) {
  const Layout layout({{"a", 2}, {"b", 3}, {"c", 2}}, 12);
  for (int rank = 0; rank < 12; ++rank) {
    EXPECT_EQ(layout.coordinate(rank, 0), rank / 6);
    EXPECT_EQ(layout.coordinate(rank, 1), rank / 2 % 3);
    EXPECT_EQ(layout.coordinate(rank, 2), rank % 2);
  }
}

TEST(Layout, PartsDifferAlongTheirAxesOnly) {
  const Layout layout({{"a", 2}, {"b", 3}, {"c", 2}}, 12);
  EXPECT_THAT(layout.part(9, {0}), ElementsAre(3, 9));
  EXPECT_THAT(layout.part(9, {1}), ElementsAre(7, 9, 11));
  EXPECT_THAT(layout.part(9, {2}), ElementsAre(8, 9));
  EXPECT_THAT(layout.part(9, {0, 2}), ElementsAre(2, 3, 8, 9));
  EXPECT_THAT(layout.part(9, {0, 1}), ElementsAre(1, 3, 5, 7, 9, 11));
  EXPECT_THAT(layout.part(9, {0, 1, 2}), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(Layout, NamesAreOfThePartAndPlacesOfTheRank) {
  const Layout layout({{"pipeline", 2}, {"replicate", 3}, {"shard", 2}}, 12);
  EXPECT_EQ(layout.name(9, {2}), "shard of pipeline[1], replicate[1]");
  EXPECT_EQ(layout.place(9, {2}), "shard[1] of pipeline[1], replicate[1]");
  EXPECT_EQ(layout.name(9, {1, 2}), "replicate, shard of pipeline[1]");
  EXPECT_EQ(layout.place(9, {1, 2}), "replicate[1], shard[1] of pipeline[1]");
  EXPECT_EQ(Layout({{"shard", 4}}, 4).place(3, {0}), "shard[3]");
}

TEST(Layout, OneAxisTakesWhatIsLeft) {
  EXPECT_EQ(text_of(Layout({{"a", 2}, {"b", -1}}, 8).axes()), "a (2), b (4)");
  EXPECT_EQ(text_of(Layout({{"a", -1}, {"b", 8}}, 8).axes()), "a (1), b (8)");
  EXPECT_EQ(text_of(Layout({{"a", -1}}, 1).axes()), "a (1)");
  expect_refused(
      {{"a", 3}, {"b", -1}}, 8,
      "in a (3), b (-1), axis 'b' cannot take what is left: 3 ranks of the other axes do "
      "not divide the group's 8; together they may have 1, 2, 4 or 8");
  expect_refused({{"a", -1}, {"b", -1}}, 8, "the axes 'a' and 'b' both have -1 ranks");
}

TEST(Layout, WrongProductsSayWhatWouldFit) {
  expect_refused({{"a", 2}, {"b", 3}}, 8,
                 "a (2), b (3) make 6 ranks, and the group has 8; a (2), b (4) would fit");
  expect_refused({{"a", 4}, {"b", 4}}, 8, "a (2), b (4) or a (4), b (2) would fit");
  expect_refused({{"a", 3}, {"b", 3}}, 8, "give numbers whose product is 8");
  constexpr int kMost = std::numeric_limits<int>::max();
  expect_refused({{"a", kMost}, {"b", kMost}, {"c", kMost}}, 8, "make at least 2147483648 ranks");
  expect_refused({{"a", kMost}, {"b", kMost}, {"c", -1}}, 8, "at least 2147483648 ranks");
}

TEST(Layout, BadAxesAreNamed) {
  expect_refused({}, 4, "no axes are given");
  expect_refused({{"a", 2}, {"", 2}}, 4, "axis 1 (of a (2),  (2)) has no name");
  expect_refused({{"a", 2}, {"a", 2}}, 4, "two axes have the name 'a'");
  expect_refused({{"a", 0}, {"b", -1}}, 4, "axis 'a' has 0 ranks");
  expect_refused({{"a", -2}, {"b", 2}}, 4, "axis 'a' has -2 ranks");
  expect_refused({{"a/b", 4}}, 4, "the name of axis 0 contains");
  expect_refused({{"a\n", 4}}, 4, "the name of axis 0 contains");
}

TEST(Layout, HostByHostNumberingCausesNoWarning) {
  const std::vector<std::string> hosts{"x", "x", "x", "x", "y", "y", "y", "y"};
  for (const Axes& axes : {Axes{{"a", 2}, {"b", 4}}, Axes{{"a", 4}, {"b", 2}}, Axes{{"b", 8}},
                           Axes{{"a", 1}, {"b", 8}}, Axes{{"a", 8}, {"b", 1}}}) {
    EXPECT_EQ(crossing_hosts(Layout(axes, 8), hosts), std::nullopt) << text_of(axes);
  }
  EXPECT_EQ(crossing_hosts(Layout({{"a", 1}}, 1), {"x"}), std::nullopt);
}

TEST(Layout, LastAxisThatCrossesHostsIsNamed) {
  const std::vector<std::string> turns{"x", "y", "x", "y"};
  const auto warning = crossing_hosts(Layout({{"a", 2}, {"b", 2}}, 4), turns);
  ASSERT_TRUE(warning);
  EXPECT_THAT(*warning, HasSubstr("axis 'b', the last one, crosses hosts"));
  EXPECT_THAT(*warning, HasSubstr("rank 0 is on x and rank 1 on y"));
  // An axis of one rank crosses nothing; the one before it counts.
  const auto before = crossing_hosts(Layout({{"a", 4}, {"b", 1}}, 4), turns);
  EXPECT_THAT(before.value_or(""), HasSubstr("axis 'a'"));
  // Ranks of a host are apart, but no part along the last axis crosses.
  EXPECT_EQ(crossing_hosts(Layout({{"a", 3}, {"b", 2}}, 6), {"x", "x", "y", "y", "x", "x"}),
            std::nullopt);
}

}  // namespace
}  // namespace weft::mesh
