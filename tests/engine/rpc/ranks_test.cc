// SPDX-License-Identifier: Apache-2.0
// Error::ranks() of calls: the ranks that an error names, which also travel with it.
#include <atomic>
#include <csignal>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/tests/engine/rpc/workers.h>

namespace ranks_of_errors {

using namespace weft;

int throws() { throw Error(Blame::PeerLost, "ranks 2, 5 are lost").with_ranks({5, 2}); }
int throws_another() { throw std::runtime_error("no rank"); }
int passes_on(int rank) { return rpc::this_agent().sync<&throws>(rank); }
std::atomic<Promise<int>*> answer{
    nullptr};  // of the last call of never(); earlier ones are never answered
Future<int> never() {
  auto* const promise = new Promise<int>();
  answer = promise;
  return promise->future();
}
void answer_now() { answer.load()->set(0); }
void nothing() {}

}  // namespace ranks_of_errors

namespace weft::harness {
namespace {

using namespace ranks_of_errors;
using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::IsEmpty;

class RanksOfErrors : public testing::TestWithParam<Setting> {};

TEST_P(RanksOfErrors, TravelWithThrownErrors) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (const int to : {1, 0}) {
      EXPECT_THAT(error_of([&] { agent.sync<&throws>(to); }).ranks(), ElementsAre(2, 5)) << to;
      EXPECT_THAT(error_of([&] { agent.async<&throws>(to).get(); }).ranks(), ElementsAre(2, 5));
      EXPECT_THAT(error_of([&] { agent.sync<&passes_on>(to, 0); }).ranks(), ElementsAre(2, 5));
      EXPECT_THAT(error_of([&] { agent.sync<&throws_another>(to); }).ranks(), IsEmpty());
    }
    const auto created = agent.remote<&throws>(1);
    EXPECT_THAT(error_of([&] { created.to_here(); }).ranks(), ElementsAre(2, 5));
    EXPECT_THAT(error_of([&] { created.created().get(); }).ranks(), ElementsAre(2, 5));
  });
}

TEST_P(RanksOfErrors, TimeoutNamesTheCallee) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const Error error = error_of([&] { agent.sync<&never>(rpc::to(1).timeout(200ms)); });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.ranks(), ElementsAre(1));
    agent.sync<&answer_now>(1);  // otherwise the graceful shutdown would wait for it
  });
}

INSTANTIATE_TEST_SUITE_P(All, RanksOfErrors, testing::ValuesIn(settings({2})), name_of);

TEST(RanksOfLostWorkers, ErrorNamesTheLostCallee) {
  Processes processes(3, [](int rank) {
    auto agent = rpc::init("worker" + std::to_string(rank), {.timeout = 50s});
    for (int other = 0; other < 3; ++other) agent.sync<&nothing>(other);
    Future<int> pending;
    if (rank != 2) pending = agent.async<&never>(2);
    Processes::say("ready");
    if (rank == 2) {
      for (;;) ::pause();
    }
    const Error lost = error_of([&] { pending.get(); });
    EXPECT_EQ(lost.blame(), Blame::PeerLost) << lost.what();
    EXPECT_THAT(lost.ranks(), ElementsAre(2));
    const Error not_all = error_of([&] { agent.shutdown({.timeout = 20s}); });
    EXPECT_THAT(not_all.ranks(), ElementsAre(2)) << not_all.what();
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(2, SIGKILL);
  processes.expect_success({2});
}

}  // namespace
}  // namespace weft::harness
