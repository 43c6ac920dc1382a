// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <weft/profiling/trace/called_by.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/tests/profiling/trace/timeline_of_children.h>

namespace weft::trace {
namespace {

TEST(CalledBy, TheOutermostCounts) {
  EXPECT_EQ(CalledBy::name(), nullptr);
  {
    const CalledBy outer("outer");
    { const CalledBy inner("inner"); }
    EXPECT_STREQ(CalledBy::name(), "outer");
  }
  EXPECT_EQ(CalledBy::name(), nullptr);
}

TEST(CalledBy, IsRecordedWithTheOperation) {
  const auto recorder = std::make_unique<FlightRecorder>();
  const auto record = [&] {
    recorder->begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .reduction = "Sum"}, 1);
  };
  {
    const CalledBy by("GradScaler");
    record();
  }
  record();
  const auto records = recorder->read();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_STREQ(records[0].called_by, "GradScaler");
  EXPECT_STREQ(records[0].reduction, "Sum");
  EXPECT_STREQ(records[1].called_by, "");
}

TEST_F(Timeline, ShowsWhatCalledAnOperation) {
  run(0, 1, [] {
    const CalledBy by("unit \"a\"");
    Operation::begin(member(0, 1), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
  });
  const auto spans = events(read(), "X");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].at("name"), "all_reduce");
  EXPECT_EQ(spans[0].at("args").at("called_by"), "unit \"a\"");
}

TEST_F(Timeline, ShowsNoCallerOfTheUsersOwnCall) {
  run(0, 1, [] {
    Operation::begin(member(0, 1), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
  });
  EXPECT_FALSE(events(read(), "X").at(0).at("args").contains("called_by"));
}

}  // namespace
}  // namespace weft::trace
