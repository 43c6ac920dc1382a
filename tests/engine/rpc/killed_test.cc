// SPDX-License-Identifier: Apache-2.0
// A worker is killed at each point of a reference's life: the others go on, and count none of its
// references afterwards.
#include <csignal>
#include <thread>

#include <gtest/gtest.h>

#include <weft/tests/engine/rpc/refs.h>

namespace killed {

using namespace weft;

// Holds the reference until the gate opens.
int hold(RRef<int> given, std::string gate) {
  refs::number_behind(0, std::move(gate));
  return given.to_here();
}

}  // namespace killed

namespace weft {
namespace {

using harness::error_of;
using harness::expect_counters;
using harness::Processes;
using namespace std::chrono_literals;

// The point at which worker 1, the victim, is killed. Worker 0 owns the values that the victim
// refers to; worker 2 uses both workers.
enum class Point {
  CreationAskedFor,  // the victim waits for a value to be created on worker 0
  CreationAsked,     // worker 2 waits for a value to be created on the victim
  ForkUnconfirmed,   // worker 2 gave the victim a reference that worker 0 does not know
  ForkWaited,        // the same, and worker 2 has dropped its own reference
  FetchAskedFor,     // the victim fetches a value
  FetchAsked,        // worker 2 fetches a value of the victim
  CopyAskedFor,      // the victim had worker 0 copy a value to worker 2
  CopyAsked,  // the victim is to copy its value to worker 0, where a call of worker 2 waits for it
  CopyTaken,  // worker 0 is to copy a value to the victim
  Idle,       // the victim holds a reference and owns a value
  HoldsAll,   // the victim holds a reference, and a function on it one to worker 2's value
  GiverUnaccepted,  // the victim gave worker 2 a reference; worker 0 knows it, but the victim
                    // has not been told
  OwnedByTwo,       // worker 2 and worker 0 refer to a value of the victim
  OwnerUnaware,     // worker 2 gave worker 0 a reference to a value of the victim, which does not
                    // know it yet
};
const char* text(Point point) {
  constexpr const char* kTexts[] = {
      "CreationAskedFor", "CreationAsked",   "ForkUnconfirmed", "ForkWaited",  "FetchAskedFor",
      "FetchAsked",       "CopyAskedFor",    "CopyAsked",       "CopyTaken",   "Idle",
      "HoldsAll",         "GiverUnaccepted", "OwnedByTwo",      "OwnerUnaware"};
  return kTexts[static_cast<int>(point)];
}
void PrintTo(Point point, std::ostream* out) { *out << text(point); }

using Case = std::tuple<std::string, Point>;
class Killed : public testing::TestWithParam<Case> {};

[[noreturn]] void stay(rpc::Agent& agent) {
  Processes::say("ready");
  agent.sync<&refs::number_behind>(rpc::to(agent.self()).timeout(0ms), 0, "never");
  std::abort();
}

// Worker 1's part until it is killed.
[[noreturn]] void become_victim(rpc::Agent& agent, Point point) {
  if (point == Point::CreationAskedFor) {
    const auto asked = agent.remote<&refs::number_behind>(0, 1, "creation");
    expect_counters(agent, 0, {1, 1, 0});
    stay(agent);
  }
  if (point == Point::FetchAskedFor) {
    const auto value = agent.remote<&refs::number_behind>(0, 1, "creation");
    const auto fetched = value.fetch();
    expect_counters(agent, 0, {1, 1, 0});
    stay(agent);
  }
  if (point == Point::CopyAskedFor) {
    const auto value = agent.remote<&refs::number_behind>(0, 1, "creation");
    const auto copy = value.copy_to(2);
    expect_counters(agent, 0, {1, 1, 0});
    expect_counters(agent, 2, {1, 1, 0});
    stay(agent);
  }
  if (point == Point::ForkUnconfirmed || point == Point::ForkWaited) {
    while (agent.debug_info().pending_users == 0) std::this_thread::yield();
    stay(agent);
  }
  if (point == Point::Idle || point == Point::HoldsAll) {
    const auto there = agent.remote<&refs::number>(0, 1);
    EXPECT_EQ(there.to_here(), 1);
    stay(agent);
  }
  stay(agent);
}

// Worker 2's part: it uses worker 1 until that is killed, and checks what happens then.
void survive(rpc::Agent& agent, Point point) {
  const auto see_the_end = [&](const auto& reference) {
    for (int again = 0; again < 2; ++again) {
      const auto error = error_of([&] { reference.to_here(10s); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    }
  };
  if (point == Point::CreationAsked) {
    const auto asked = agent.remote<&refs::number_behind>(1, 1, "creation");
    expect_counters(agent, 1, {1, 1, 0});
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { asked.created().get(); }).blame(), Blame::PeerLost);
    EXPECT_THROW(asked.to_here(), rpc::CreationError);
    EXPECT_THROW(agent.sync<&refs::fetch_sum>(0, asked, asked), rpc::CreationError);
  } else if (point == Point::FetchAsked) {
    const auto asked = agent.remote<&refs::number_behind>(1, 1, "creation");
    const auto fetched = asked.fetch();
    expect_counters(agent, 1, {1, 1, 0});
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { fetched.get(); }).blame(), Blame::PeerLost);
    see_the_end(asked);
  } else if (point == Point::CopyAsked) {
    const auto asked = agent.remote<&refs::number_behind>(1, 1, "creation");
    const auto copy = asked.copy_to(0);
    const auto used = agent.async<&refs::plus_local>(rpc::to(0).timeout(0ms), copy, 1);
    expect_counters(agent, 1, {1, 1, 0});
    Processes::say("ready");
    const auto error = error_of([&] { used.get(); });
    EXPECT_EQ(error.blame(), Blame::Remote);
    EXPECT_NE(error.text().find("worker1"), std::string::npos) << error.text();
    EXPECT_EQ(error_of([&] { copy.to_here(); }).blame(), Blame::PeerLost);
  } else if (point == Point::CopyTaken) {
    const auto value = agent.remote<&refs::number_behind>(rpc::to(0).timeout(0ms), 1, "copy");
    const auto copy = value.copy_to(1);
    const auto used = agent.async<&refs::plus_local>(1, copy, 1);
    expect_counters(agent, 0, {1, 1, 0});
    expect_counters(agent, 1, {1, 1, 0});
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { used.get(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(error_of([&] { copy.to_here(); }).blame(), Blame::PeerLost);
    agent.sync<&refs::open_gate>(0, "copy");
    EXPECT_EQ(error_of([&] { copy.created().get(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(error_of([&] { copy.to_here(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(value.to_here(), 1);
  } else if (point == Point::ForkUnconfirmed) {
    const auto value = agent.remote<&refs::number>(0, 1);
    const auto held = agent.async<&killed::hold>(rpc::to(1).timeout(0ms), value, "never");
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { held.get(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(value.to_here(), 1) << "the giver's own reference still works";
  } else if (point == Point::ForkWaited) {
    Future<int> held;
    {
      const auto value = agent.remote<&refs::number>(0, 1);
      held = agent.async<&killed::hold>(rpc::to(1).timeout(0ms), value, "never");
    }
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { held.get(); }).blame(), Blame::PeerLost);
  } else if (point == Point::Idle) {
    const auto theirs = agent.remote<&refs::number>(1, 5);
    EXPECT_EQ(theirs.to_here(), 5);
    expect_counters(agent, 0, {1, 1, 0});  // worker 1's reference
    Processes::say("ready");
    expect_counters(agent, 0, {0, 0, 0});  // worker 1's reference has ended
    see_the_end(theirs);
  } else if (point == Point::HoldsAll) {
    const RRef<int> mine(agent, 7);
    const auto held = agent.async<&killed::hold>(rpc::to(1).timeout(0ms), mine, "never");
    while (agent.debug_info().forks == 0) std::this_thread::yield();
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { held.get(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(mine.local_value(), 7);
  } else if (point == Point::GiverUnaccepted) {
    const auto given = agent.sync<&refs::make_on>(1, agent.worker(0), 1);
    EXPECT_EQ(given.to_here(), 1);
    while (!given.confirmed()) std::this_thread::yield();
    expect_counters(agent, 0, {1, 2, 0});  // the giver keeps its own reference until it is told
    Processes::say("ready");
    expect_counters(agent, 0, {1, 1, 0});
    EXPECT_EQ(given.to_here(), 1) << "it no longer depends on its giver";
  } else if (point == Point::OwnedByTwo) {
    const auto theirs = agent.remote<&refs::number>(1, 5);
    const auto held = agent.async<&killed::hold>(rpc::to(0).timeout(0ms), theirs, "theirs");
    const auto asked = agent.async<&refs::number_behind>(rpc::to(1).timeout(0ms), 1, "never");
    expect_counters(agent, 1, {1, 2, 0});
    Processes::say("ready");
    EXPECT_EQ(error_of([&] { asked.get(); }).blame(),
              Blame::PeerLost);  // before this error the value could still be fetched
    see_the_end(theirs);
    agent.sync<&refs::open_gate>(0, "theirs");
    const auto error = error_of([&] { held.get(); });
    EXPECT_EQ(error.blame(), Blame::Remote) << error.text();
    EXPECT_NE(error.text().find("worker1"), std::string::npos) << error.text();
  } else if (point == Point::OwnerUnaware) {
    const auto theirs = agent.remote<&refs::number>(1, 5);
    EXPECT_EQ(theirs.to_here(), 5);
    const auto held = agent.async<&killed::hold>(rpc::to(0).timeout(0ms), theirs, "never");
    expect_counters(agent, 0, {0, 0, 1});
    Processes::say("ready");
    const auto error = error_of([&] { held.get(); });
    EXPECT_NE(error.text().find("worker1"), std::string::npos) << error.text();
    see_the_end(theirs);
  } else {
    if (point == Point::CopyAskedFor) expect_counters(agent, 2, {1, 1, 0});
    expect_counters(agent, 0, {1, 1, 0});  // the value that worker 1 waits for
    Processes::say("ready");
  }
}

TEST_P(Killed, OthersGoOnAndNothingIsCounted) {
  const auto& [transport, point] = GetParam();
  Processes workers(3, [transport, point](int rank) {
    rpc::Options options{.rank = rank, .world_size = 3, .transports = {transport}};
    const bool is_late = point == Point::ForkUnconfirmed || point == Point::ForkWaited;
    if (rank == 1 && is_late) options.faults.delay[rpc::MessageKind::Fork] = 10min;
    if (rank == 2 && point == Point::GiverUnaccepted)
      options.faults.delay[rpc::MessageKind::ChildAccept] = 10min;
    if (rank == 0 && point == Point::OwnerUnaware)
      options.faults.delay[rpc::MessageKind::Fork] = 1s;
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options);
    if (rank == 1) become_victim(agent, point);
    if (rank == 2) {
      survive(agent, point);
      expect_counters(agent, 0, {0, 0, 0});
      expect_counters(agent, 2, {0, 0, 0});
      agent.sync<&refs::open_gate>(0, "creation");
      EXPECT_EQ(agent.remote<&refs::number>(0, 3).to_here(), 3)
          << "the survivors must still reach each other";
      for (const int worker : {0, 2}) expect_counters(agent, worker, {0, 0, 0});
      agent.sync<&refs::finish>(0);
      return;
    }
    Processes::say("ready");
    while (!refs::finished) std::this_thread::yield();
    while (agent.debug_info().handlers_busy > 0) std::this_thread::yield();
    // A message to worker 1 that a reference has ended is retried for 2.4 s.
    const auto deadline = Deadline::in(5s);
    while (agent.debug_info().calls_waiting > 0 && !deadline.passed()) std::this_thread::yield();
    EXPECT_EQ(agent.debug_info().calls_waiting, 0U);
  });
  for (const int rank : {0, 1, 2}) workers.wait_for(rank, "ready");
  workers.signal(1, SIGKILL);
  workers.expect_success({1});
}

INSTANTIATE_TEST_SUITE_P(
    Rpc, Killed,
    testing::Combine(testing::Values("shm", "tcp"),
                     testing::Values(Point::CreationAskedFor, Point::CreationAsked,
                                     Point::ForkUnconfirmed, Point::ForkWaited,
                                     Point::FetchAskedFor, Point::FetchAsked, Point::CopyAskedFor,
                                     Point::CopyAsked, Point::CopyTaken, Point::Idle,
                                     Point::HoldsAll, Point::GiverUnaccepted, Point::OwnedByTwo,
                                     Point::OwnerUnaware)),
    [](const auto& one) { return std::get<0>(one.param) + text(std::get<1>(one.param)); });

class KilledInShutdown : public testing::TestWithParam<std::tuple<std::string, int>> {};

// shutdown() fails at once on the others, whether or not the killed worker had called it as well.
TEST_P(KilledInShutdown, OthersShutdownFailsAtOnce) {
  const auto& [transport, victim] = GetParam();
  Processes workers(3, [transport](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank),
                                 {.rank = rank, .world_size = 3, .transports = {transport}});
    const auto there = agent.remote<&refs::number>((rank + 1) % 3, 1);
    EXPECT_EQ(there.to_here(), 1);
    if (rank == 1) stay(agent);  // it is the victim, or the others wait for it
    Processes::say("ready");
    const auto error = error_of([&] { agent.shutdown({.timeout = 0ms}); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    const auto info = agent.debug_info();
    EXPECT_EQ(info.owner_rrefs + info.forks + info.pending_users + info.calls_waiting, 0U);
    EXPECT_EQ(error_of([&] { there.to_here(); }).blame(), Blame::Caller) << "this worker has left";
  });
  for (const int rank : {0, 1, 2}) workers.wait_for(rank, "ready");
  workers.signal(victim, SIGKILL);
  workers.expect_success({1, victim});  // worker 1 never comes
}

INSTANTIATE_TEST_SUITE_P(Rpc, KilledInShutdown,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Values(0, 1, 2)),
                         [](const auto& one) {
                           return std::get<0>(one.param) + "Worker" +
                                  std::to_string(std::get<1>(one.param));
                         });

}  // namespace
}  // namespace weft
