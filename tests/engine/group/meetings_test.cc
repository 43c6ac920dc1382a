// SPDX-License-Identifier: Apache-2.0
// The places where threads of a rank wait. Scripted: no store and no group.
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/group/meetings.h>

namespace weft::group {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Meetings::Held place(const std::string& name, bool is_meeting,
                     std::function<std::vector<std::string>()> lines) {
  return std::make_shared<const Meetings::Place>(
      Meetings::Place{name, "default", is_meeting, std::move(lines)});
}

Meetings::Held place(const std::string& name, bool is_meeting = true) {
  return place(name, is_meeting, [name] { return std::vector<std::string>{"line of " + name}; });
}

TEST(Meetings, AreListedFirst) {
  Meetings meetings;
  const auto own = place("a wait", /*is_meeting=*/false);
  const auto met = place("a meeting");
  meetings.begin(own);
  meetings.begin(met);
  EXPECT_THAT(meetings.lines("default"), ElementsAre("line of a meeting", "line of a wait"));
  EXPECT_THAT(meetings.lines("other"), IsEmpty());
}

TEST(Meetings, NewestIsTheLastThatGoesOn) {
  Meetings meetings;
  const auto first = place("first"), second = place("second");
  meetings.begin(first);
  meetings.begin(second);
  EXPECT_EQ(meetings.newest(), "second");
  meetings.end(second);
  EXPECT_EQ(meetings.newest(), "first");
  meetings.end(first);
  EXPECT_EQ(meetings.newest(), "");
}

// The store may answer late, or never.
TEST(Meetings, BeginAndEndWhileOneIsAsked) {
  Meetings meetings;
  std::promise<void> asked, answered;
  auto slow = place("slow", true, [&asked, answer = answered.get_future().share()] {
    asked.set_value();
    answer.wait();
    return std::vector<std::string>{"late"};
  });
  meetings.begin(slow);
  auto lines = std::async(std::launch::async, [&] { return meetings.lines("default"); });
  asked.get_future().wait();
  const auto other = place("other");
  meetings.begin(other);
  EXPECT_EQ(meetings.newest(), "other");
  meetings.end(slow);
  slow.reset();
  answered.set_value();
  EXPECT_THAT(lines.get(), IsEmpty()) << "that wait is over";
  EXPECT_THAT(meetings.lines("default"), ElementsAre("line of other"));
}

}  // namespace
}  // namespace weft::group
