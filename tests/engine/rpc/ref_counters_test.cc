// SPDX-License-Identifier: Apache-2.0
// The counters that each worker has of references: exact while they live, and zero at the end.
#include <thread>

#include <gtest/gtest.h>

#include <weft/engine/rref/control.h>
#include <weft/tests/engine/rpc/refs.h>

namespace weft {
namespace {

using harness::expect_counters;
using harness::run_one;
using namespace std::chrono_literals;

TEST(RefCounters, UnsharedValueIsNotCounted) {
  run_one([](rpc::Agent& agent) {
    const RRef<int> mine(agent, 1);
    expect_counters(agent, 0, {0, 0, 0});
  });
}

// With three workers, the counters of each are exact and end at zero.
TEST(RefCounters, ValuesEndWithTheirLastReference) {
  run_one([](rpc::Agent& agent) {
    {
      const auto account = agent.remote<refs::Account>(1, 1);
      const auto copy = account;
      EXPECT_EQ(copy.sync<&refs::Account::get>(), 1);
      expect_counters(agent, 1, {1, 1, 0});
      const auto mine = RRef<int>(agent, 2);
      const auto kept = agent.remote<&refs::kept>(2, account, mine);  // worker 2 holds both
      kept.created().get();
      expect_counters(agent, 1, {1, 2, 0});
      expect_counters(agent, 2, {1, 1, 0});
      expect_counters(agent, 0, {1, 1, 0});
      EXPECT_EQ(refs::living, 1);
    }
    for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
    EXPECT_EQ(refs::living, 0);
  });
}

// A user's destructor may take long.
TEST(RefCounters, ValueCountsUntilItIsDestroyed) {
  run_one([](rpc::Agent& agent) {
    agent.remote<refs::EndsBehind>(1, "end").created().get();
    refs::number_behind(0, "end asked");
    expect_counters(agent, 1, {1, 0, 0});
    refs::open_gate("end");
    expect_counters(agent, 1, {0, 0, 0});
  });
}

TEST(RefCounters, CopiesAreCountedByTheirOwners) {
  run_one([](rpc::Agent& agent) {
    {
      const auto value = agent.remote<&refs::number>(1, 1);
      const auto copy = value.copy_to(2);
      EXPECT_EQ(copy.to_here(), 1);
      expect_counters(agent, 1, {1, 1, 0});
      expect_counters(agent, 2, {1, 1, 0});
      const auto here = copy.copy_to(0);
      EXPECT_EQ(here.local_value(), 1);
      const auto back = RRef<int>(agent, 5).copy_to(1);
      EXPECT_EQ(agent.sync<&refs::local_sum>(1, value, back), 6);
      expect_counters(agent, 1, {2, 2, 0});
      expect_counters(agent, 0, {0, 0, 0});
    }
    for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
  });
}

TEST(RefCounters, CopiedHandlesCountOnce) {
  run_one([](rpc::Agent& agent) {
    {
      const auto account = agent.remote<refs::Account>(1, 1);
      account.created().get();
      expect_counters(agent, 1, {1, 1, 0});
      const auto copy = account;
      expect_counters(agent, 1, {1, 1, 0});
      const auto held = agent.remote<&refs::own>(1, 1).to_here();
      expect_counters(agent, 1, {2, 2, 0});
    }
    expect_counters(agent, 1, {0, 0, 0});
    expect_counters(agent, 0, {0, 0, 0});
    EXPECT_EQ(refs::living, 0);
  });
}

// Sends a control message twice, as happens when its reply is lost.
template <auto F>
void send_twice(rpc::Agent& agent, int to, rpc::MessageKind kind,
                const typename call::detail::FunctionBody<F>::Arguments& arguments) {
  for (int time = 0; time < 2; ++time) {
    call::issue<call::detail::FunctionBody<F>>(agent.shared_core(),
                                               {to, 20s, kind, /*on_loop=*/true}, arguments)
        .get();
  }
}
std::uint64_t fork_of(const RRef<int>& reference) { return reference.handle()->fork(); }

TEST(RefCounters, RepeatedForksAndEndsCountOnce) {
  run_one([](rpc::Agent& agent) {
    auto first = agent.remote<&refs::number>(1, 4);
    auto other = agent.sync<&refs::give_back>(1, first);
    const auto id = first.handle()->id();
    const auto fork = first.handle()->fork(), fork_of_other = other.handle()->fork();
    send_twice<&rref::internal::fork>(agent, 1, rpc::MessageKind::Fork, {id, fork});
    first = {};
    send_twice<&rref::internal::user_delete>(agent, 1, rpc::MessageKind::UserDelete, {id, fork});
    expect_counters(agent, 1, {1, 1, 0});
    EXPECT_EQ(other.to_here(), 4) << "the other reference still works";
    send_twice<&rref::internal::fork>(agent, 1, rpc::MessageKind::Fork, {id, fork});  // late
    other = {};
    expect_counters(agent, 1, {0, 0, 0});
    send_twice<&rref::internal::fork>(agent, 1, rpc::MessageKind::Fork, {id, fork_of_other});
    send_twice<&rref::internal::user_delete>(agent, 1, rpc::MessageKind::UserDelete,
                                             {id, fork_of_other});
    expect_counters(agent, 1, {0, 0, 0});
  });
}

TEST(RefCounters, RepeatedAcceptancesCountOnce) {
  run_one([](rpc::Agent& agent) {
    const auto given = agent.sync<&refs::make_on>(1, agent.worker(2), 5);
    expect_counters(agent, 2, {1, 1, 0});  // the giver's own reference has ended
    while (!given.confirmed()) std::this_thread::yield();
    send_twice<&rref::internal::child_accepted>(agent, 1, rpc::MessageKind::ChildAccept,
                                                {given.handle()->fork()});
    expect_counters(agent, 1, {0, 0, 0});
    expect_counters(agent, 2, {1, 1, 0});
    EXPECT_EQ(given.to_here(), 5);
  });
}

TEST(RefCounters, OnlyMissingForksAreGivenBack) {
  run_one([](rpc::Agent& agent) {
    const RRef<int> mine(agent, 7);
    auto held = agent.remote<&refs::give_back>(1, mine);
    const auto fork = held.sync<&fork_of>();
    const std::vector<std::pair<rref::Id, rref::ForkId>> owned{{mine.handle()->id(), fork}};
    expect_counters(agent, 0, {1, 1, 0});
    send_twice<&rref::internal::give_back>(agent, 1, rpc::MessageKind::Fork, {owned, {fork}});
    EXPECT_EQ(held.sync<&refs::fetch_held>(), 7);
    expect_counters(agent, 0, {1, 1, 0});
    held = {};
    expect_counters(agent, 0, {0, 0, 0});
    auto again = agent.remote<&refs::give_back>(1, mine);
    again.created().get();
    send_twice<&rref::internal::give_back>(agent, 1, rpc::MessageKind::Fork, {owned, {fork}});
    while (agent.debug_info().calls_waiting > 0) std::this_thread::yield();
    expect_counters(agent, 1, {1, 1, 0});
    expect_counters(agent, 0, {1, 1, 0});
    EXPECT_EQ(again.sync<&refs::fetch_held>(), 7) << "another fork of the same value was ended";
  });
}

TEST(RefCounters, FalseFailureKeepsACreatedValue) {
  run_one([](rpc::Agent& agent) {
    const call::Outcome why(static_cast<int>(Blame::Timeout), "said twice");
    {
      const auto value = agent.remote<&refs::number>(1, 4);
      value.created().get();
      send_twice<&rref::internal::will_not_come>(agent, 1, rpc::MessageKind::UserDelete,
                                                 {value.handle()->id(), why});
      EXPECT_EQ(value.to_here(), 4);
      expect_counters(agent, 1, {1, 1, 0});
    }
    expect_counters(agent, 1, {0, 0, 0});
  });
}

}  // namespace
}  // namespace weft
