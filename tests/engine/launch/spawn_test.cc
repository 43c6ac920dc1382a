// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/ops/ones.h>

#include <weft/base/descriptor.h>
#include <weft/engine/launch/process.h>
#include <weft/group.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/tests/harness/ranks.h>
#include <weft/tests/harness/sanitized.h>

namespace weft {
namespace {

using harness::error_of;

[[noreturn]] void wait_for_the_end() {
  for (;;) ::pause();
}

// Expects that no child is left, running or unreaped.
void expect_no_children() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(Spawn, EachRankIsAProcessThatCanJoin) {
  const pid_t parent = ::getpid();
  spawn(3, [&](int rank, int world_size) {
    const auto is = [](const char* name, int value) {
      return std::atoi(std::getenv(name)) == value;
    };
    if (::getpid() == parent || ::getppid() == parent)
      throw std::runtime_error("no process of its own");
    if (!is("RANK", rank) || !is("LOCAL_RANK", rank) || !is("WORLD_SIZE", world_size) ||
        !is("LOCAL_WORLD_SIZE", 3)) {
      throw std::runtime_error("wrong variables");
    }
    auto group = init_process_group();
    const auto tensor = at::ones({1});
    group.all_reduce(tensor).wait();
    if (tensor.item<float>() != 3) throw std::runtime_error("wrong sum");
  });
  expect_no_children();
  EXPECT_EQ(std::getenv("RANK"), nullptr) << "the parent's environment has not changed";
}

TEST(Spawn, RanksHaveTheProgramsName) {
  const auto name = [] {
    std::array<char, 16> text{};
    ::prctl(PR_GET_NAME, text.data());
    return std::string(text.data());
  };
  const std::string program = name();
  ::prctl(PR_SET_NAME, "of my own");
  spawn(1, [&](int, int) {
    std::string rank;  // the main thread's name; this thread has inherited it
    std::getline(std::ifstream("/proc/self/comm"), rank);
    if (rank != "of my own" || name() != "of my own")
      throw std::runtime_error("the rank is called '" + rank + "'");
  });
  EXPECT_EQ(name(), "of my own");
  ::prctl(PR_SET_NAME, program.c_str());
}

TEST(Spawn, RanksMeetBelowTorchrun) {
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  spawn(2, [](int, int) {
    auto group = init_process_group({.timeout = std::chrono::seconds(20)});
    const auto tensor = at::ones({1});
    group.all_reduce(tensor).wait();
    if (tensor.item<float>() != 2) throw std::runtime_error("wrong sum");
  });
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
}

TEST(Spawn, RanksComputeAfterTheirParentHas) {
  if (harness::kThreadSanitized) {
    GTEST_SKIP() << "the thread sanitizer refuses new threads in a process that was forked while "
                    "other threads ran, as OpenMP's do here";
  }
  const auto compute = [] {
    const at::Tensor a = at::ones({1000, 1000});
    return a.add(a).add(a).numel();  // in parallel
  };
  EXPECT_EQ(compute(), 1'000'000);
  for (int times = 0; times < 2; ++times) {
    spawn(2, [&](int, int) {
      if (compute() != 1'000'000) throw std::runtime_error("wrong");
    });
    EXPECT_EQ(compute(), 1'000'000);
  }
}

TEST(Spawn, FirstFailureEndsAllAndIsRethrown) {
  const auto error = error_of([] {
    spawn(3, [](int rank, int) {
      if (rank == 1)
        throw Error(Blame::Unsupported, "this and\nthat", 7, {"a folder/a file.cc", 12})
            .with_ranks({0, 2});
      wait_for_the_end();
    });
  });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_EQ(error.text(), "rank 1: this and\nthat");
  EXPECT_EQ(error.native_code(), 7);
  EXPECT_STREQ(error.place().file, "a folder/a file.cc");
  EXPECT_EQ(error.place().line, 12);
  EXPECT_EQ(error.ranks(), (std::vector<int>{0, 2}));
  expect_no_children();
}

TEST(Spawn, OtherExceptionsAreRemote) {
  const auto error = error_of([] {
    spawn(2, [](int rank, int) { rank == 0 ? throw std::runtime_error("why") : void(); });
  });
  EXPECT_EQ(error.blame(), Blame::Remote);
  EXPECT_EQ(error.text(), "rank 0: why");
}

TEST(Spawn, TorchExceptionLosesItsStack) {
  const Error error = error_of([] { spawn(1, [](int, int) { at::ones({2}).view({3}); }); });
  EXPECT_EQ(error.blame(), Blame::Remote);
  EXPECT_NE(error.text().find("shape '[3]' is invalid"), std::string::npos) << error.text();
  EXPECT_EQ(error.text().find("frame #"), std::string::npos) << error.text();
  EXPECT_EQ(error.text().find("Exception raised from"), std::string::npos) << error.text();
}

TEST(Spawn, FailedRanksChildDelaysNothing) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(
      spawn(2,
            [](int rank, int) {
              if (rank != 0) return wait_for_the_end();
              if (::fork() == 0) {  // keeps the rank's descriptors, except those that ctest reads
                for (const int descriptor : {0, 1, 2}) ::close(descriptor);
                ::sleep(20);
                ::_exit(0);
              }
              throw std::runtime_error("done for");
            }),
      Error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

// A child must not go on as a second parent, which would end the other ranks.
TEST(Spawn, RankWithoutAThreadHasFailed) {
  const harness::NoMoreThreads no_more;
  if (harness::can_make_threads())
    GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
  const pid_t parent = ::getpid();
  Error error(Blame::Remote, "none");
  try {
    spawn(2, [](int, int) {});
  } catch (const Error& caught) {
    error = caught;
  } catch (...) {
  }
  if (::getpid() != parent) ::_exit(1);
  EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
  EXPECT_NE(error.text().find(": spawn: starting its thread; "), std::string::npos) << error.text();
  expect_no_children();
}

TEST(Spawn, IgnoredSigchldErrorSaysWhatToDo) {
  ::signal(SIGCHLD, SIG_IGN);
  try {
    spawn(1, [](int, int) {});
    ADD_FAILURE() << "not refused, though the child cannot be waited for";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("signal(SIGCHLD, SIG_DFL)"), std::string::npos) << error.text();
  }
  ::signal(SIGCHLD, SIG_DFL);
}

// Reaps every child on SIGCHLD, as a host program with many children may do.
class WithAReaper : public testing::Test {
 protected:
  void SetUp() override {
    std::signal(SIGCHLD, [](int) {
      const int before = errno;
      while (::waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      errno = before;
    });
  }
  void TearDown() override { std::signal(SIGCHLD, SIG_DFL); }
};

TEST_F(WithAReaper, ReturningRanksSucceed) {
  spawn(2, [](int, int) {});
  expect_no_children();
}

TEST_F(WithAReaper, RanksErrorIsRethrown) {
  const auto error = error_of([] {
    spawn(2, [](int rank, int) {
      if (rank == 1) throw Error(Blame::Unsupported, "this");
      wait_for_the_end();
    });
  });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_EQ(error.text(), "rank 1: this");
  expect_no_children();
}

TEST_F(WithAReaper, KilledRankIsLost) {
  const auto error = error_of([] {
    spawn(2, [](int rank, int) {
      if (rank == 1) ::raise(SIGKILL);
      wait_for_the_end();
    });
  });
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_EQ(error.text(), "rank 1 ended with signal 9 (Killed)");
  expect_no_children();
}

TEST(Children, ReapedElsewhereAreNotSignalled) {
  for (const auto reach : {launch::Reach::Children, launch::Reach::Descendants}) {
    launch::Children children(reach);
    const pid_t process = ::fork();
    if (process == 0) ::_exit(0);
    children.add(process);
    ::waitpid(process, nullptr, 0);
    EXPECT_TRUE(children.reached().empty());
    children.end_all(std::chrono::seconds(1));
    const auto ended = children.wait(std::chrono::seconds(10));
    EXPECT_EQ(ended.process, process);
    EXPECT_EQ(ended.status, launch::kTakenStatus);
    EXPECT_TRUE(children.running().empty());
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST(Spawn, KilledRankIsLostExitedRankFailed) {
  const auto killed = error_of([] {
    spawn(2, [](int rank, int) {
      if (rank == 1) ::raise(SIGKILL);
      wait_for_the_end();
    });
  });
  EXPECT_EQ(killed.blame(), Blame::PeerLost);
  EXPECT_EQ(killed.text(), "rank 1 ended with signal 9 (Killed)");
  const auto exited = error_of([] { spawn(1, [](int, int) { ::_exit(3); }); });
  EXPECT_EQ(exited.blame(), Blame::Remote);
  EXPECT_EQ(exited.text(), "rank 0 ended with exit code 3");
}

TEST(Spawn, RethrowsTheCauseNotItsEffects) {
  const auto error = error_of([] {
    spawn(3, [](int rank, int) {
      auto group = init_process_group();
      group.barrier().wait();
      if (rank == 2) throw Error(Blame::Device, "the cause");
      group.all_reduce(at::ones({1})).wait();
    });
  });
  EXPECT_EQ(error.blame(), Blame::Device) << error.what();
  EXPECT_EQ(error.text(), "rank 2: the cause");
}

// A program whose ranks start processes that ignore SIGTERM. Each process holds the writing end of
// a pipe as long as it lives.
class StartedByRanks {
 public:
  StartedByRanks() {
    int ends[2];
    int go[2];
    if (::pipe(ends) != 0 || ::pipe(go) != 0) throw std::runtime_error("pipe");
    reading_ = Descriptor(ends[0]);
    Descriptor writing(ends[1]);
    const Descriptor told(go[0]);
    go_ = Descriptor(go[1]);
    program_ = ::fork();
    if (program_ != 0) return;
    reading_ = {};
    try {
      spawn(2, [&](int, int) {
        start(writing.get(), /*orphan=*/false);
        start(writing.get(), /*orphan=*/true);
        char byte = 0;
        if (::read(told.get(), &byte, 1) == 1) throw std::runtime_error("done for");
      });
    } catch (const Error&) {
    }
    ::_exit(0);
  }
  ~StartedByRanks() {
    ::kill(program_, SIGKILL);
    ::waitpid(program_, nullptr, 0);
  }
  StartedByRanks(const StartedByRanks&) = delete;
  StartedByRanks& operator=(const StartedByRanks&) = delete;

  void wait_until_all_run() const {
    for (int left = 4; left > 0; --left) {
      char byte = 0;
      if (::read(reading_.get(), &byte, 1) != 1) throw std::runtime_error("a process has ended");
    }
  }
  void let_a_rank_fail() const {
    if (::write(go_.get(), "g", 1) != 1) throw std::runtime_error("no rank is left");
  }
  bool all_end() const {
    pollfd watched{reading_.get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&watched, 1, 30'000) == 1 && ::read(reading_.get(), &byte, 1) == 0;
  }
  pid_t program() const { return program_; }

 private:
  static void start(int writing, bool orphan) {
    if (::fork() != 0) return;
    if (orphan && ::fork() != 0) ::_exit(0);
    std::signal(SIGTERM, SIG_IGN);
    if (::write(writing, "r", 1) != 1) ::_exit(1);
    wait_for_the_end();
  }

  pid_t program_ = 0;
  Descriptor reading_;
  Descriptor go_;
};

TEST(Spawn, KilledProgramEndsRanksChildren) {
  const StartedByRanks started;
  started.wait_until_all_run();
  ::kill(started.program(), SIGKILL);
  EXPECT_TRUE(started.all_end());
}

TEST(Spawn, FailureEndsRanksChildren) {
  const StartedByRanks started;
  started.wait_until_all_run();
  started.let_a_rank_fail();
  EXPECT_TRUE(started.all_end());
}

TEST(Spawn, SuccessLeavesRanksChildren) {
  pid_t left = 0;
  {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    spawn(1, [&](int, int) {
      const pid_t child = ::fork();
      if (child == 0) wait_for_the_end();
      ASSERT_EQ(::write(ends[1], &child, sizeof child), static_cast<ssize_t>(sizeof child));
    });
    ASSERT_EQ(::read(ends[0], &left, sizeof left), static_cast<ssize_t>(sizeof left));
    ::close(ends[0]);
    ::close(ends[1]);
  }
  EXPECT_EQ(::kill(left, SIGKILL), 0);
}

TEST(Spawn, TakesOneTo4096Ranks) {
  for (const int ranks : {-1, 0, 4097}) {
    EXPECT_EQ(error_of([=] { spawn(ranks, [](int, int) {}); }).text(),
              "spawn: " + std::to_string(ranks) + " ranks; it takes 1 to 4096");
  }
}

TEST(Spawn, EmptyFunctionIsRefused) {
  const auto error = error_of([] { spawn(2, nullptr); });
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_EQ(error.text(), "spawn: the function is empty");
}

TEST(Children, AreDescribedByTheirEnd) {
  EXPECT_EQ(launch::describe_status(3 << 8), "exit code 3");
  EXPECT_EQ(launch::describe_status(SIGSEGV), "signal 11 (Segmentation fault)");
}

}  // namespace
}  // namespace weft
