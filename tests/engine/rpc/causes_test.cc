// SPDX-License-Identifier: Apache-2.0
// Errors and log lines name causes that lie outside of the call itself.
#include <chrono>
#include <csignal>
#include <future>
#include <mutex>
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
// Blocks until the test releases the mutex.
std::mutex held;
int after_release(int value) {
  std::lock_guard lock(held);
  return value;
}
int calls_back(int value) {
  return weft::rpc::this_agent().sync<&after_release>(weft::rpc::this_call().caller, value);
}
weft::RRef<int> value_made_there() {
  weft::rpc::Agent& here = weft::rpc::this_agent();
  return here.remote<&after_release>(here.self(), 1);
}
int recurses(int depth) {
  weft::rpc::Agent& here = weft::rpc::this_agent();
  if (depth == 0) throw std::runtime_error("the bottom is reached");
  return here.sync<&recurses>(1 - here.self().rank, depth - 1);
}
int throws(int value) { throw std::runtime_error("no luck with " + std::to_string(value)); }
int throws_too(int value) { throw std::runtime_error("nor with " + std::to_string(value)); }

}  // namespace causes

namespace weft {
namespace {

using harness::error_of;
using harness::LogWatch;
using harness::Processes;

// Blocks SIGUSR2 in this process and in those that it forks; the test sends it to let a worker go
// on.
sigset_t block_go() {
  sigset_t go;
  sigemptyset(&go);
  sigaddset(&go, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &go, nullptr);
  return go;
}
void wait_for_go(const sigset_t& go) {
  int came = 0;
  sigwait(&go, &came);
}

// Stops the process, and blocks until it has stopped.
void stop(Processes& processes, int rank) {
  processes.signal(rank, SIGSTOP);
  ASSERT_TRUE(harness::comes_true([&] {
    int status = 0;
    return ::waitpid(processes.process(rank), &status, WUNTRACED | WNOHANG) > 0 &&
           WIFSTOPPED(status);
  }));
}

// A stopped worker accepts no connection, like one behind a firewall that drops packets.
TEST(Causes, TimeoutNamesTheUnansweredAddress) {
  const sigset_t go = block_go();
  Processes processes(2, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"tcp"}});
    Processes::say("joined");
    if (rank == 1) {
      EXPECT_TRUE(harness::comes_true([&] { return agent.debug_info().calls_served > 1; },
                                      std::chrono::seconds(50)));
      return agent.shutdown();
    }
    wait_for_go(go);  // the test has stopped the other one
    const Error error = error_of([&] {
      agent.sync<&causes::plus>(rpc::to("worker1").timeout(std::chrono::milliseconds(200)), 1, 2);
    });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_NE(error.text().find("nothing has come from that worker yet by tcp (127.0.0.1:"),
              std::string::npos)
        << error.what();
    EXPECT_NE(error.text().find("WEFT_SOCKET_IFNAME"), std::string::npos) << error.what();
    Processes::say("late");
    EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
    EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
    agent.shutdown();
  });
  processes.wait_for(0, "joined");
  processes.wait_for(1, "joined");
  stop(processes, 1);
  processes.signal(0, SIGUSR2);
  processes.wait_for(0, "late");
  processes.signal(1, SIGCONT);
  processes.expect_success();
}

rpc::Agent agent_that_soon_says(int rank) {
  rpc::Options options{.transports = {"tcp"}};
  options.wait_reports = {std::chrono::milliseconds(100)};
  return rpc::init("worker" + std::to_string(rank), options);
}

// Waits until this process has logged `lines` lines about shutdown(), and returns its log.
std::string lines_about_shutdown(std::ptrdiff_t lines) {
  const auto logged = [] { return LogWatch::current().text(); };
  const auto count = [](const std::string& text) {
    std::ptrdiff_t found = 0;
    for (auto at = text.find("shutdown()"); at != std::string::npos;
         at = text.find("shutdown()", text.find('\n', at)))
      ++found;
    return found;
  };
  EXPECT_TRUE(harness::comes_true([&] { return count(logged()) >= lines; })) << logged();
  EXPECT_EQ(count(logged()), lines) << logged();
  return logged();
}

TEST(Causes, ShutdownReportsAStoppedRankZero) {
  const sigset_t go = block_go();
  Processes processes(3, [&](int rank) {
    rpc::Agent agent = agent_that_soon_says(rank);
    Processes::say("joined");
    wait_for_go(go);
    const auto ended = std::async(std::launch::async, [&] { agent.shutdown(); });
    if (rank == 1) {
      const std::string line = lines_about_shutdown(1);
      EXPECT_NE(line.find("worker1 (rank 1) has waited"), std::string::npos) << line;
      EXPECT_NE(line.find("in shutdown(): worker0 (rank 0), which decides"), std::string::npos)
          << line;
      EXPECT_NE(line.find("does not answer"), std::string::npos) << line;
      Processes::say("said");
    }
    ended.wait();
    if (rank != 1) lines_about_shutdown(0);  // only the lowest rank that waits logs
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "joined");
  stop(processes, 0);
  processes.signal(1, SIGUSR2);
  processes.signal(2, SIGUSR2);
  processes.wait_for(1, "said");
  processes.signal(0, SIGUSR2);
  processes.signal(0, SIGCONT);
  processes.expect_success();
}

TEST(Causes, RankZeroReportsAStoppedWorker) {
  const sigset_t go = block_go();
  Processes processes(2, [&](int rank) {
    rpc::Agent agent = agent_that_soon_says(rank);
    if (rank == 1) return agent.shutdown();
    const std::string waits = lines_about_shutdown(1);
    EXPECT_NE(waits.find("which has not called it"), std::string::npos) << waits;
    Processes::say("awaited");
    wait_for_go(go);
    const auto ended = std::async(std::launch::async, [&] { agent.shutdown(); });
    const std::string lines = lines_about_shutdown(2);
    EXPECT_NE(lines.find("worker0 (rank 0) has waited"), std::string::npos) << lines;
    EXPECT_NE(lines.find("worker1 (rank 1) does not answer"), std::string::npos) << lines;
    Processes::say("said");
    ended.wait();
  });
  processes.wait_for(0, "awaited");
  stop(processes, 1);
  processes.signal(0, SIGUSR2);
  processes.wait_for(0, "said");
  processes.signal(1, SIGCONT);
  processes.expect_success();
}

// Runs two workers as threads. The first runs `waits` on another thread; expects one line about
// that wait in the log, with all of `texts`.
void expect_line_of_wait(const std::function<void(rpc::Agent& agent)>& waits,
                         const std::vector<std::string>& texts, rpc::Options options = {}) {
  options.wait_reports = {std::chrono::milliseconds(100)};
  const auto run = [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    std::future<void> ended;
    {
      std::lock_guard lock(causes::held);
      ended = std::async(std::launch::async, [&] { waits(agent); });
      const auto log = [] { return LogWatch::current().text(); };
      const std::string begin = "worker0 (rank 0) has waited";
      EXPECT_TRUE(harness::comes_true([&] { return log().find(begin) != std::string::npos; }));
      const std::string all = log();
      const auto at = std::min(all.find(begin), all.size());
      const std::string line = all.substr(at, all.find('\n', at) - at);
      for (const std::string& text : texts)
        EXPECT_NE(line.find(text), std::string::npos) << text << " in: " << all;
      EXPECT_EQ(all.find(begin, at + 1), std::string::npos) << "more than one line: " << all;
    }
    ended.get();
  };
  harness::run_workers({harness::As::Threads, "shm", 2}, run, options);
}

TEST(Causes, LongWaitSaysTheCalleeRunsIt) {
  expect_line_of_wait([](rpc::Agent& agent) { agent.sync<&causes::after_release>("worker1", 1); },
                      {"for causes::after_release on worker1 (rank 1), which has run it for "});
}

TEST(Causes, LongWaitAdvisesATimeLimit) {
  expect_line_of_wait(
      [](rpc::Agent& agent) {
        const auto background = agent.async<&causes::after_release>("worker1", 1);
        const auto result = agent.async<&causes::after_release>(
            rpc::to("worker1").timeout(std::chrono::seconds(0)), 2);
        result.wait();
        background.wait();
      },
      {"which has run it for ", "the call has no time limit: rpc::to(worker).timeout"});
}

TEST(Causes, LongWaitSaysTheCalleeIsBusy) {
  expect_line_of_wait(
      [](rpc::Agent& agent) {
        const auto busy = agent.async<&causes::after_release>("worker1", 1);
        agent.sync<&causes::plus>("worker1", 1, 2);
        busy.wait();
      },
      {"for causes::plus on worker1 (rank 1), which has not begun it: its only thread is busy"},
      {.worker_threads = 1});
}

TEST(Causes, LongWaitSaysWhatTheCalleeAwaits) {
  expect_line_of_wait([](rpc::Agent& agent) { agent.sync<&causes::calls_back>("worker1", 1); },
                      {"for causes::calls_back on worker1 (rank 1), which has run it for ",
                       "; it waits itself for causes::after_release on worker0 (rank 0)"});
}

TEST(Causes, LongWaitSaysTheValueIsUncreated) {
  expect_line_of_wait(
      [](rpc::Agent& agent) { agent.sync<&causes::value_made_there>("worker1").to_here(); },
      {"for the value of an RRef on worker1 (rank 1), which has not created it yet"});
}

TEST(Causes, LongWaitNamesTheValuesFunction) {
  expect_line_of_wait(
      [](rpc::Agent& agent) { agent.remote<&causes::after_release>("worker1", 1).to_here(); },
      {"is causes::after_release on worker1 (rank 1), which has run it for "});
}

TEST(Causes, LongWaitNamesTheOldestPendingCall) {
  expect_line_of_wait(
      [](rpc::Agent& agent) {
        agent.async<&causes::after_release>("worker1", 1)
            .then([](int value) { return value; })
            .get();
      },
      {"for a future; the call that has been pending for longest is causes::after_release on "
       "worker1 (rank 1), which has run"});
}

TEST(Causes, LongWaitReportsAStoppedCallee) {
  const sigset_t go = block_go();
  Processes processes(2, [&](int rank) {
    rpc::Agent agent = agent_that_soon_says(rank);
    if (rank == 0) EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
    Processes::say("joined");
    if (rank == 1) return agent.shutdown();
    wait_for_go(go);
    const auto sum =
        std::async(std::launch::async, [&] { return agent.sync<&causes::plus>("worker1", 1, 2); });
    const auto log = [] { return LogWatch::current().text(); };
    EXPECT_TRUE(harness::comes_true(
        [&] { return log().find("worker0 (rank 0) has waited") != std::string::npos; }));
    EXPECT_NE(log().find("for causes::plus on worker1 (rank 1), which does not answer"),
              std::string::npos)
        << log();
    Processes::say("said");
    sum.wait();
    agent.shutdown();
  });
  for (int rank = 0; rank < 2; ++rank) processes.wait_for(rank, "joined");
  stop(processes, 1);
  processes.signal(0, SIGUSR2);
  processes.wait_for(0, "said");
  processes.signal(1, SIGCONT);
  processes.expect_success();
}

TEST(Causes, ShutdownSaysWhatALateWorkerDoes) {
  const std::string text =
      harness::warnings_of(2, [](rpc::Agent&) {});  // nothing is logged if nobody waits
  EXPECT_EQ(text, "");
  rpc::Options options;
  options.wait_reports = {std::chrono::milliseconds(100)};
  harness::run_workers(
      {harness::As::Threads, "shm", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;  // worker 1 shuts down
        std::future<int> result;
        {
          std::lock_guard lock(causes::held);
          result = std::async(std::launch::async,
                              [&] { return agent.sync<&causes::after_release>("worker1", 1); });
          const auto log = [] { return LogWatch::current().text(); };
          EXPECT_TRUE(harness::comes_true(
              [&] { return log().find("shutdown() has been waiting") != std::string::npos; }));
          const std::string part =
              "for worker0 (rank 0), which has not called it: it waits for causes::after_release "
              "on worker1";
          EXPECT_NE(log().find(part), std::string::npos) << log();
        }
        result.get();
      },
      options);
}

TEST(Causes, LongChainOfErrorsIsShortened) {
  harness::run_workers({harness::As::Threads, "shm", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto expect_text = [&](int depth, const std::string& part) {
      const Error error = error_of([&] { agent.sync<&causes::recurses>("worker1", depth); });
      EXPECT_NE(error.text().find(part), std::string::npos) << error.text();
      EXPECT_TRUE(error.text().ends_with("threw: the bottom is reached")) << error.text();
      EXPECT_LT(error.text().size(), 1000U) << error.text();
    };
    expect_text(3, "causes::recurses on worker1 threw: causes::recurses on worker0 threw: ");
    expect_text(40, " threw: … 32 calls between … threw: ");
  });
}

TEST(Causes, CallSaysThatItsCalleeHasLeft) {
  Processes processes(2, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"shm"}});
    if (rank == 1) return agent.leave();
    EXPECT_TRUE(harness::comes_true([&] {
      const Error error = error_of([&] {
        for (;;) agent.sync<&causes::plus>("worker1", 1, 2);  // until it has left
      });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
      EXPECT_NE(error.text().find("worker1 (rank 1) has left, or its process has ended ("),
                std::string::npos)
          << error.text();
      return true;
    }));
    agent.leave();
  });
  processes.expect_success();
}

TEST(Causes, TimeoutSaysTheCalleeHadNoThread) {
  harness::run_workers(
      {harness::As::Threads, "shm", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto busy = agent.async<&causes::take_a_thread>("worker1");
        const Error error = error_of([&] {
          agent.sync<&causes::plus>(rpc::to("worker1").timeout(std::chrono::seconds(3)), 1, 2);
        });
        EXPECT_EQ(error.blame(), Blame::Timeout);
        EXPECT_NE(error.text().find("worker1 (rank 1) had no thread for it"), std::string::npos)
            << error.what();
        EXPECT_NE(error.text().find("raise rpc::Options::worker_threads there"), std::string::npos)
            << error.what();
        causes::gate.set_value();
        busy.get();
        EXPECT_EQ(agent.sync<&causes::plus>("worker1", 1, 2), 3);
      },
      {.worker_threads = 1});
}

TEST(Causes, RepeatedErrorsAreLoggedRarely) {
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
  EXPECT_EQ(count(text, "no luck with 0"), 1) << "the first error is logged once: " << text;
  EXPECT_NE(text.find("(256 times so far)"), std::string::npos) << text;
  EXPECT_EQ(count(text, "causes::throws_too,"), 1)
      << "errors of each function are counted apart: " << text;
}

class WithoutDescriptors : public testing::TestWithParam<std::string> {};

TEST_P(WithoutDescriptors, InitFailsAndNamesTheLimit) {
  const auto init = [] {
    rpc::Agent agent = rpc::init("alone", {.rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .transports = {GetParam()}});
    agent.shutdown();
  };
  init();  // opens the descriptors that stay open
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
