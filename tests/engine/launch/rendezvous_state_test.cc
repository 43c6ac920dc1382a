// SPDX-License-Identifier: Apache-2.0
// Tests the state that nodes agree on, change by change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/launch/rendezvous_state.h>

namespace weft::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Node node(const std::string& id) {
  return {.id = id, .address = "10.0.0." + id, .port = 1000, .ranks = 2};
}

std::vector<std::string> ids(const RendezvousState& state) {
  std::vector<std::string> found;
  for (const Node& one : state.nodes) found.push_back(one.id);
  return found;
}

// Returns the state of a running round.
RendezvousState running(const RendezvousLimits& limits, const std::vector<std::string>& nodes) {
  RendezvousState state;
  for (const std::string& id : nodes) come(state, node(id), limits);
  run_if_ready(state, limits, /*is_last_call_over=*/true);
  EXPECT_TRUE(state.is_running);
  return state;
}

TEST(RendezvousState, RunsWhenFull) {
  const RendezvousLimits limits{.least = 2, .most = 2};
  RendezvousState state;
  come(state, node("1"), limits);
  run_if_ready(state, limits, true);
  EXPECT_FALSE(state.is_running);
  come(state, node("1"), limits);  // again, as nodes do until it runs
  come(state, node("2"), limits);
  run_if_ready(state, limits, false);
  EXPECT_TRUE(state.is_running);
  EXPECT_THAT(ids(state), ElementsAre("1", "2"));
}

TEST(RendezvousState, OnlyFirstRoundWaitsForLastCall) {
  const RendezvousLimits limits{.least = 1, .most = 3, .restarts = 9};
  RendezvousState state;
  come(state, node("1"), limits);
  run_if_ready(state, limits, false);
  EXPECT_FALSE(state.is_running);
  run_if_ready(state, limits, true);
  EXPECT_TRUE(state.is_running);
  fail(state, limits, "rank 0 failed", 1);
  come(state, node("1"), limits);
  run_if_ready(state, limits, false);
  EXPECT_TRUE(state.is_running);
  EXPECT_EQ(state.round, 1);
  EXPECT_EQ(state.restarts, 1);
  EXPECT_EQ(state.cause, "rank 0 failed");
}

TEST(RendezvousState, RoundWaitsForTheNodesOfTheLast) {
  const RendezvousLimits limits{.least = 1, .most = 3, .restarts = 9};
  RendezvousState state = running(limits, {"1", "2", "3"});
  fail(state, limits, "rank 4 failed", 1);
  come(state, node("3"), limits);
  come(state, node("1"), limits);
  run_if_ready(state, limits, true);
  EXPECT_FALSE(state.is_running) << "node 2 has not come";
  come(state, node("2"), limits);
  run_if_ready(state, limits, false);
  EXPECT_TRUE(state.is_running);
  EXPECT_THAT(ids(state), ElementsAre("1", "2", "3"));
}

TEST(RendezvousState, RankWishesComeFirst) {
  const RendezvousLimits limits{.least = 3, .most = 3};
  RendezvousState state;
  Node last = node("2"), first = node("3");
  last.wish = 2;
  first.wish = 0;
  for (const Node& one : {last, node("1"), first}) come(state, one, limits);
  run_if_ready(state, limits, false);
  EXPECT_THAT(ids(state), ElementsAre("3", "2", "1")) << "nodes without a wish come last";
}

TEST(RendezvousState, LostNodeIsNotWaitedFor) {
  const RendezvousLimits limits{.least = 1, .most = 2, .restarts = 0};
  RendezvousState state = running(limits, {"1", "2"});
  remove(state, limits, "1", "is lost");
  EXPECT_EQ(state.round, 1);
  EXPECT_EQ(state.restarts, 0) << "a lost node is no failure";
  EXPECT_EQ(state.cause, "the node at 10.0.0.1 is lost");
  come(state, node("2"), limits);
  run_if_ready(state, limits, false);
  EXPECT_TRUE(state.is_running);
  EXPECT_THAT(ids(state), ElementsAre("2"));
}

TEST(RendezvousState, LossWhileARoundBeginsAddsNoRound) {
  const RendezvousLimits limits{.least = 1, .most = 2, .restarts = 9};
  RendezvousState state = running(limits, {"1", "2"});
  fail(state, limits, "rank 0 failed", 1);
  come(state, node("2"), limits);
  remove(state, limits, "1", "is lost");
  EXPECT_EQ(state.round, 1);
  run_if_ready(state, limits, false);
  EXPECT_THAT(ids(state), ElementsAre("2"));
  EXPECT_TRUE(state.is_running);
}

TEST(RendezvousState, LateNodeJoinsTheNextRound) {
  const RendezvousLimits limits{.least = 1, .most = 2, .restarts = 0};
  RendezvousState state = running(limits, {"1"});
  EXPECT_FALSE(has_room_for_more(state, limits));
  come(state, node("2"), limits);
  come(state, node("2"), limits);
  EXPECT_THAT(state.waiting, ElementsAre("2"));
  EXPECT_TRUE(has_room_for_more(state, limits));
  begin_next(state, limits, "a node has come");
  come(state, node("2"), limits);
  run_if_ready(state, limits, true);
  EXPECT_FALSE(state.is_running) << "node 1 has not come";
  come(state, node("1"), limits);
  run_if_ready(state, limits, false);
  EXPECT_THAT(ids(state), ElementsAre("1", "2"));
  EXPECT_THAT(state.waiting, IsEmpty());
}

TEST(RendezvousState, WaitingNodeTakesNoOthersPlace) {
  const RendezvousLimits limits{.least = 2, .most = 2, .restarts = 9};
  RendezvousState state = running(limits, {"1", "2"});
  come(state, node("3"), limits);
  EXPECT_FALSE(has_room_for_more(state, limits));
  fail(state, limits, "rank 0 failed", 1);
  come(state, node("3"), limits);
  come(state, node("2"), limits);
  EXPECT_THAT(ids(state), ElementsAre("2"));
  EXPECT_THAT(state.waiting, ElementsAre("3"));
  remove(state, limits, "1", "is lost");
  come(state, node("3"), limits);
  run_if_ready(state, limits, false);
  EXPECT_THAT(ids(state), ElementsAre("2", "3"));
  EXPECT_TRUE(state.is_running);
}

TEST(RendezvousState, LastFailureEndsTheJob) {
  const RendezvousLimits limits{.least = 1, .most = 1, .restarts = 1};
  RendezvousState state = running(limits, {"1"});
  fail(state, limits, "rank 0 failed", 3);
  EXPECT_FALSE(state.end);
  come(state, node("1"), limits);
  run_if_ready(state, limits, false);
  fail(state, limits, "rank 1 failed", 4);
  ASSERT_TRUE(state.end);
  EXPECT_EQ(*state.end, (JobEnd{4, "rank 1 failed"}));
}

TEST(RendezvousState, JobSucceedsWhenAllNodesHave) {
  const RendezvousLimits limits{.least = 2, .most = 2};
  RendezvousState state = running(limits, {"1", "2"});
  finish(state, "1");
  EXPECT_FALSE(state.end);
  finish(state, "of another job");
  EXPECT_FALSE(state.end);
  remove(state, limits, "1", "is lost");
  EXPECT_EQ(state.round, 0) << "a finished node is not missed";
  finish(state, "2");
  ASSERT_TRUE(state.end);
  EXPECT_EQ(state.end->code, 0);
}

TEST(RendezvousState, FinishedNodeRestartsWithOthers) {
  const RendezvousLimits limits{.least = 2, .most = 2, .restarts = 1};
  RendezvousState state = running(limits, {"1", "2"});
  finish(state, "1");
  fail(state, limits, "rank 2 failed", 1);
  come(state, node("1"), limits);
  come(state, node("2"), limits);
  run_if_ready(state, limits, false);
  finish(state, "2");
  EXPECT_FALSE(state.end) << "node 1 has to run again";
}

TEST(RendezvousState, SurvivesEncodingAndDecoding) {
  const RendezvousLimits limits{.least = 1, .most = 3, .restarts = 9};
  RendezvousState state = running(limits, {"1", "2"});
  come(state, node("3"), limits);
  EXPECT_EQ(decode(encode(state)), state);
  fail(state, limits, "rank \"0\" failed\n", 1);
  EXPECT_EQ(decode(encode(state)), state);
  agree(state, limits);
  EXPECT_EQ(decode(encode(state)), state);
  state.end = JobEnd{255, "enough"};
  EXPECT_EQ(decode(encode(state)), state);
}

TEST(RendezvousState, LongCauseIsCutBetweenCharacters) {
  const RendezvousLimits limits{.restarts = 1};
  RendezvousState state = running(limits, {"1"});
  std::string why = "x";
  while (why.size() < 5000) why += "\u00e9";
  fail(state, limits, why, 1);
  EXPECT_EQ(state.cause.size(), 4095u);
  EXPECT_EQ(decode(encode(state)), state);
}

TEST(RendezvousState, BadStateIsRefused) {
  const std::string good = encode(running({.least = 1, .most = 1}, {"1"}));
  const auto refusal = [](const std::string& text) {
    try {
      decode(text);
      return std::string("it was read");
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Protocol);
      return error.text();
    }
  };
  const auto with = [&](const std::string& what, const std::string& instead) {
    std::string text = good;
    return text.replace(text.find(what), what.size(), instead);
  };
  ASSERT_EQ(encode(decode(good)), good);
  for (const std::string& text :
       {std::string("no JSON"), std::string("[]"), with("\"round\":0", "\"round\":-1"),
        with("\"ranks\":2", "\"ranks\":0"), with("\"port\":1000", "\"port\":65536"),
        with("\"former\":[]", "\"former\":7"), with("\"restarts\":0", "\"restarts\":1e99"),
        with("\"id\":\"1\"", "\"id\":\"" + std::string(5000, 'x') + "\"")}) {
    EXPECT_THAT(refusal(text), HasSubstr("the rendezvous' state in the store cannot be read"))
        << text;
  }
}

}  // namespace
}  // namespace weft::launch
