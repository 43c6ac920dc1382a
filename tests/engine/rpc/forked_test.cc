// SPDX-License-Identifier: Apache-2.0
// Children that are forked from a worker share its connections, and must neither use nor end them.
#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/autograd.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/forked.h>

namespace forked {

using namespace weft;

int plus(int a, int b) { return a + b; }
int own(int value) { return value; }
int fetch(RRef<int> reference) { return reference.to_here(); }
void wait_for_ever() { Promise<void>().future().wait(); }
std::atomic<bool> reached{false};
void reach() { reached = true; }

}  // namespace forked

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::expect_child_to_end_well;
using harness::Processes;

// The agent, references and future that a worker has when it forks.
struct Held {
  explicit Held(std::optional<rpc::Agent>& its_agent, int other)
      : agent(its_agent),
        there(agent->remote<&forked::own>(other, 7)),
        here(*agent, 4),
        future(agent->async<&forked::plus>(other, 1, 2)) {
    EXPECT_EQ(there.to_here(), 7);
    EXPECT_EQ(agent->sync<&forked::fetch>(other, here), 4);
  }
  std::optional<rpc::Agent>& agent;
  RRef<int> there, here;
  Future<int> future;
};

void expect_inherited(const std::function<void()>& use) {
  const Error error = error_of(use);
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_NE(error.text().find("was forked"), std::string::npos) << error.what();
}

class ForkedWorkers : public testing::TestWithParam<std::string> {
 protected:
  // Both workers fork children that run `child`; afterwards the workers still reach each other, and
  // their references and futures still work.
  static void fork_and_go_on(const std::function<void(Held& held)>& child) {
    Processes processes(2, [&](int rank) {
      std::optional<rpc::Agent> agent =
          rpc::init("worker" + std::to_string(rank), {.transports = {GetParam()}});
      const int other = 1 - rank;
      {
        Held held(agent, other);
        for (int i = 0; i < 3; ++i) expect_child_to_end_well([&] { child(held); });
        EXPECT_EQ(agent->sync<&forked::plus>(other, 1, 2), 3);
        EXPECT_EQ(held.there.to_here(), 7);
        EXPECT_EQ(agent->sync<&forked::fetch>(other, held.here), 4);
        EXPECT_EQ(held.future.get(), 3);
      }
      agent->shutdown();
    });
    processes.expect_success();
  }
};

TEST_P(ForkedWorkers, ExitSilently) {
  fork_and_go_on([](Held&) {});
}

TEST_P(ForkedWorkers, DropTheAgentSilently) {
  fork_and_go_on([](Held& held) {
    held.agent.reset();
    held.there = {};
    held.here = {};
    held.future = {};
  });
}

TEST_P(ForkedWorkers, UnwindSilently) {
  fork_and_go_on([](Held& held) {
    const auto unwind = [&held] {
      const rpc::Agent agent = std::move(*held.agent);
      const auto there = std::move(held.there);
      const auto here = std::move(held.here);
      throw std::runtime_error("as if by the child's own work");
    };
    EXPECT_THROW(unwind(), std::runtime_error);
  });
}

TEST_P(ForkedWorkers, LeaveSilently) {
  fork_and_go_on([](Held& held) { held.agent->leave(); });
}

TEST_P(ForkedWorkers, GetACallerErrorForEachUse) {
  fork_and_go_on([](Held& held) {
    const rpc::Agent& agent = *held.agent;
    expect_inherited([&] { agent.sync<&forked::plus>(0, 1, 2); });
    expect_inherited([&] { agent.sync<&forked::plus>(1, 1, 2); });
    expect_inherited([&] { agent.remote<&forked::own>(1, 2); });
    expect_inherited([&] { static_cast<void>(agent.workers()); });
    expect_inherited([&] { held.agent->shutdown(); });
    expect_inherited([&] { held.there.to_here(); });
    expect_inherited([&] { AutogradContext context(agent); });
    if (!held.future.done()) expect_inherited([&] { held.future.get(); });
  });
}

TEST_P(ForkedWorkers, MayBecomeWorkersOfAnotherJob) {
  fork_and_go_on([](Held& held) {
    held.agent.reset();
    rpc::Agent own = rpc::init("worker0", {.rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .transports = {GetParam()}});
    EXPECT_EQ(own.sync<&forked::plus>(0, 1, 2), 3);
    own.shutdown();
  });
}

// The kernel ends a killed worker's connections only when no child has them open.
TEST_P(ForkedWorkers, CloseDroppedConnections) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  Processes processes(2, [&](int rank) {
    std::optional<rpc::Agent> agent =
        rpc::init("worker" + std::to_string(rank), {.transports = {GetParam()}});
    if (rank == 0) {
      ::close(ends[1]);
      EXPECT_EQ(agent->sync<&forked::plus>(1, 1, 2), 3);
      // A connection that is being accepted while the process forks stays open in the child.
      EXPECT_TRUE(harness::comes_true([] { return forked::reached.load(); }));
      if (::fork() == 0) {
        agent.reset();
        Processes::say("dropped");
        char end = 0;
        [[maybe_unused]] const auto none = ::read(ends[0], &end, 1);  // until worker 1 has ended
        ::_exit(0);
      }
      for (;;) ::pause();
    }
    ::close(ends[0]);
    agent->sync<&forked::reach>(0);
    const auto call = agent->async<&forked::wait_for_ever>(0);
    Processes::say("called");
    EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::PeerLost);
    agent->leave();
  });
  ::close(ends[0]);
  ::close(ends[1]);
  processes.wait_for(1, "called");
  processes.wait_for(0, "dropped");
  processes.signal(0, SIGKILL);
  processes.expect_success({0});
}

INSTANTIATE_TEST_SUITE_P(Rpc, ForkedWorkers, testing::Values("shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
