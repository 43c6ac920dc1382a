// What errors and the log say of causes that lie outside of a call.
#include <chrono>
#include <csignal>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/few_descriptors.h>

namespace causes {

int plus(int a, int b) { return a + b; }
std::promise<void> gate;
void take_a_thread() { gate.get_future().wait(); }
int throws(int value) { throw std::runtime_error("no luck with " + std::to_string(value)); }
int throws_too(int value) { throw std::runtime_error("nor with " + std::to_string(value)); }

}  // namespace causes

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;

// A worker that is stopped takes no connection in, as one behind a firewall that swallows everything.
TEST(Causes, ACallThatMayNotHaveArrivedSaysWhichWayItWent) {
  sigset_t go;
  sigemptyset(&go);
  sigaddset(&go, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &go, nullptr);  // of the workers as well
  Processes processes(2, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"tcp"}});
    Processes::say("joined");
    if (rank == 1) {
      EXPECT_TRUE(harness::comes_true([&] { return agent.debug_info().calls_served > 1; }, std::chrono::seconds(50)));
      return agent.shutdown();
    }
    int came = 0;
    sigwait(&go, &came);  // the test has stopped the other one
    const Error error =
        error_of([&] { agent.sync<&causes::plus>(rpc::to("worker1").timeout(std::chrono::milliseconds(200)), 1, 2); });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_NE(error.text().find("nothing has come from that worker yet by tcp (127.0.0.1:"), std::string::npos)
        << error.what();
    EXPECT_NE(error.text().find("WEFT_SOCKET_IFNAME"), std::string::npos) << error.what();
    Processes::say("late");
    EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
    EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
    agent.shutdown();
  });
  processes.wait_for(0, "joined");
  processes.wait_for(1, "joined");
  processes.signal(1, SIGSTOP);
  const auto has_stopped = [&](int rank) {
    int status = 0;
    return ::waitpid(processes.process(rank), &status, WUNTRACED | WNOHANG) > 0 && WIFSTOPPED(status);
  };
  ASSERT_TRUE(harness::comes_true([&] { return has_stopped(1); }));
  processes.signal(0, SIGUSR2);
  processes.wait_for(0, "late");
  processes.signal(1, SIGCONT);
  processes.expect_success();
}

TEST(Causes, ACallThatHadNoThreadSaysSo) {
  harness::run_workers(
      {harness::As::Threads, "shm", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto busy = agent.async<&causes::take_a_thread>("worker1");
        const Error error =
            error_of([&] { agent.sync<&causes::plus>(rpc::to("worker1").timeout(std::chrono::seconds(3)), 1, 2); });
        EXPECT_EQ(error.blame(), Blame::Timeout);
        EXPECT_NE(error.text().find("worker1 (rank 1) had no thread for it"), std::string::npos) << error.what();
        EXPECT_NE(error.text().find("raise rpc::Options::worker_threads there"), std::string::npos) << error.what();
        causes::gate.set_value();
        busy.get();
        EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
      },
      {.worker_threads = 1});
}

TEST(Causes, AFunctionThatAlwaysThrowsIsLoggedEverMoreRarely) {
  constexpr int kCalls = 400;
  const auto count = [](const std::string& text, const std::string& part) {
    int lines = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++lines;
    return lines;
  };
  const std::string text = harness::warnings_of(2, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (int i = 0; i < kCalls; ++i) error_of([&] { agent.sync<&causes::throws>(i % 2, i); });
    error_of([&] { agent.sync<&causes::throws_too>(1, 1); });
  });
  EXPECT_GE(count(text, "causes::throws,"), 5) << text;
  EXPECT_LE(count(text, "causes::throws,"), 12) << text;
  EXPECT_EQ(count(text, "no luck with 0"), 1) << "the first one" << text;
  EXPECT_NE(text.find("(256 times so far)"), std::string::npos) << text;
  EXPECT_EQ(count(text, "causes::throws_too,"), 1) << "another function counts for itself" << text;
}

class WithoutDescriptors : public testing::TestWithParam<std::string> {};

TEST_P(WithoutDescriptors, AnAgentIsNotMadeAndSaysSo) {
  const auto init = [] {
    rpc::Agent agent = rpc::init(
        "alone", {.rank = 0, .world_size = 1, .store = c10::make_intrusive<c10d::HashStore>(), .transports = {GetParam()}});
    agent.shutdown();
  };
  init();  // what is opened once in a process is open
  bool has_joined = false;
  for (int left = 0; left < 100 && !has_joined; ++left) {
    std::optional<Error> error;
    {
      const harness::FewDescriptors few(left);
      try {
        init();
        has_joined = true;
      } catch (const Error& caught) {
        error = caught;
      }
    }
    if (!error) continue;
    EXPECT_EQ(error->blame(), Blame::Busy) << left << ": " << error->what();
    EXPECT_NE(error->text().find("ulimit -n"), std::string::npos) << left << ": " << error->what();
  }
  EXPECT_TRUE(has_joined);
}

INSTANTIATE_TEST_SUITE_P(Rpc, WithoutDescriptors, testing::Values("shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
