// SPDX-License-Identifier: Apache-2.0
// Jobs in which agents have other numbers than the ranks of a group: the server is agent 0, and the
// trainers are agents 1 and 2, and ranks 0 and 1 of their group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/profiling/tools/participants.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/tests/profiling/tools/made_dumps.h>

namespace weft::tools {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Each participant in a process of its own, or all as threads of one process.
Dumps server_and_trainers(bool as_threads = false) {
  Dumps dumps;
  Group group{"default", 0, {0, 1}, {}};
  for (int agent = 0; agent < 3; ++agent) {
    const std::size_t dump = as_threads ? 0 : static_cast<std::size_t>(agent);
    if (dump == dumps.dumps.size())
      dumps.dumps.push_back({"dump", "host", agent, kStart + 10 * kSecond, "asked"});
    dumps.agents[agent] = {dump, agent, agent, {}, agent == 0 ? "server" : "trainer"};
    if (agent > 0) group.views[agent - 1] = {dump, agent - 1, agent - 1, {}};
  }
  dumps.groups.push_back(group);
  return dumps;
}

TEST(Participants, EqualNumbersAreNotConfused) {
  Dumps dumps = server_and_trainers();
  // The server hangs; one trainer waits for it in a call, and the other waits for that trainer.
  dumps.agents[0].records = {call("served", 1, 7, "open"), call("served", 2, 7, "open")};
  dumps.agents[1].records = {call("call", 0, 7, "open")};
  dumps.agents[2].records = {call("call", 0, 7, "open")};
  dumps.groups[0].views[0].records = {collective(1, 0, 0)};
  const auto findings = analyze(dumps);
  EXPECT_TRUE(of(findings, What::CycleOfWaits).empty());
  const std::string late = of(findings, What::LateRank).at(0).text;
  EXPECT_THAT(late, HasSubstr("rank 1 is late: it has not come to collective #1"));
  EXPECT_THAT(late, HasSubstr("it is in the call of work::slowly on agent 0 for 9.0 s"));
  EXPECT_THAT(late, Not(HasSubstr("served")));
  EXPECT_THAT(of(findings, What::NoReply).at(0).text,
              HasSubstr("agent 1 ('trainer') waits for 9.0 s for a reply to the call of "
                        "work::slowly on agent 0: it has run there for 9.0 s"));
}

TEST(Participants, CyclesNameRanksAndAgents) {
  Dumps dumps = server_and_trainers();
  dumps.agents[2].records = {call("call", 1, 7, "open")};
  dumps.groups[0].views[0].records = {collective(1, 0, 0)};
  const auto circle = of(analyze(dumps), What::CycleOfWaits);
  ASSERT_EQ(circle.size(), 1u);
  EXPECT_THAT(circle[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(
      circle[0].text,
      HasSubstr("rank 0 of group 'default' (agent 1), rank 1 of group 'default' (agent 2) wait for "
                "each other: rank 0 of group 'default' (agent 1) for rank 1"));
  EXPECT_THAT(circle[0].text, HasSubstr("in the call of work::slowly on agent 1"));
  dumps.agents[0].records = {call("call", 1, 7, "failed")};
  dumps.agents[0].records[0].blame = "Remote";
  EXPECT_THAT(of(analyze(dumps), What::Failure).at(0).text,
              HasSubstr("the first failure was on agent 0 ('server'): "));
}

TEST(Participants, ThreadsOfAProcessAreToldApart) {
  Dumps dumps = server_and_trainers(/*as_threads=*/true);
  dumps.agents[1].records = {call("call", 0, 7, "open")};
  dumps.groups[0].views[0].records = {collective(1, 0, 0)};
  const auto findings = analyze(dumps);
  EXPECT_TRUE(of(findings, What::CycleOfWaits).empty());
  EXPECT_THAT(of(findings, What::LateRank).at(0).text, Not(HasSubstr("it is in")));
  // If each has one number, a rank and its agent are the same participant.
  dumps.agents.erase(2);
  const auto circle = of(analyze(dumps), What::CycleOfWaits);
  ASSERT_EQ(circle.size(), 1u);
  EXPECT_THAT(circle[0].text,
              HasSubstr("ranks 0, 1 wait for each other: rank 0 for rank 1 in collective #1"));
}

TEST(Participants, AgentsAreNoDumpsOfEqualRanks) {
  Dumps dumps = server_and_trainers();
  dumps.agents.erase(1);
  dumps.groups[0].views.erase(0);
  EXPECT_THAT(remarks(dumps, kOlderThan).without_dump, ElementsAre(0));
  dumps.agents[0].records = {call("served", 1, 7, "open")};
  dumps.agents[0].records[0].begun = kStart + 10 * kSecond - 8'000'000;
  EXPECT_THAT(remarks(dumps, kOlderThan).running,
              ElementsAre("agent 0 ('server') is in work::slowly, called by agent 1 for 8.0 ms"));
}

// The rank that the survivor had in the first group is another's in the second.
TEST(Participants, SurvivorsAreKnownInTheirNewGroup) {
  Dumps dumps = job(3);
  dumps.agents.clear();
  dumps.groups[0].views.erase(1);
  dumps.groups.push_back({"default", 0, {0, 1}, {}});
  dumps.groups[1].views[0] = {0, 0, 0, {}};
  dumps.groups[1].views[1] = {2, 1, 1, {}};
  const Participants who(dumps);
  EXPECT_EQ(who.of(dumps.groups[0].views.at(2)), who.of(dumps.groups[1].views.at(1)));
  EXPECT_FALSE(who.are_numbered_alike());
}

}  // namespace
}  // namespace weft::tools
