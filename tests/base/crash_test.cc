// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/crash.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/sanitized.h>

namespace weft {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

#ifdef WEFT_TEST_SYMBOLS
constexpr bool kSymbols = true;
#else
constexpr bool kSymbols = false;
#endif

struct Ended {
  int status = 0;
  std::string text;  // its stderr
};

// Runs `body` in a child process that leaves no core dump.
Ended run(const std::function<void()>& body) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/stderr";
  const pid_t process = ::fork();
  if (process == 0) {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    ::dup2(::open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600), STDERR_FILENO);
    body();
    ::_exit(0);
  }
  Ended ended;
  ::waitpid(process, &ended.status, 0);
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  ended.text = text.str();
  return ended;
}

int signal_of(const Ended& ended) { return WIFSIGNALED(ended.status) ? WTERMSIG(ended.status) : 0; }

std::string frame(const std::string& function) {
  return kSymbols ? function : std::string("base_test\\+0x");
}

__attribute__((noinline)) int read_from(const volatile int* where) { return *where + 1; }
__attribute__((noinline)) int divide(int by) {
  volatile int from = 1;
  return from / by;
}
__attribute__((noinline)) int recurse(int depth) {
  std::array<volatile char, 4096> room{};
  room[static_cast<std::size_t>(depth) % room.size()] = 1;
  return depth < 0 ? 0 : recurse(depth + 1) + room[1];
}
using Function = int (*)();
__attribute__((noinline)) int call(Function function) { return function() + 1; }

class Crash : public testing::Test {
 protected:
  void SetUp() override {
    if (harness::kSanitized)
      GTEST_SKIP() << "the sanitizer reports crashes, and Weft leaves its handlers alone";
  }
};

TEST_F(Crash, NamesFunctionsOfTheCrashedThread) {
  const auto ended = run([] {
    ::setenv("RANK", "7", 1);
    crash::report_crashes();
    read_from(reinterpret_cast<int*>(16));
  });
  EXPECT_EQ(signal_of(ended), SIGSEGV) << ended.text;
  EXPECT_THAT(
      ended.text,
      ContainsRegex(
          "^weft: rank 7, process [0-9]+, crashed in thread '.*': SIGSEGV, invalid access to "
          "memory, at address 0x10\n  #0 "));
  EXPECT_THAT(ended.text, ContainsRegex("#0 .*" + frame("read_from\\(int const volatile\\*\\)")));
  if (kSymbols) EXPECT_THAT(ended.text, HasSubstr("crash_test.cc:"));
  EXPECT_THAT(ended.text, ContainsRegex("base_test\\+0x[0-9a-f]+"));
  EXPECT_THAT(ended.text, Not(HasSubstr("on_crash"))) << "the handler's own frames";
}

TEST_F(Crash, IsReportedForEachSignal) {
  struct Case {
    int signal;
    std::function<void()> body;
    std::string text;
  };
  const std::array cases{
      Case{SIGFPE, [] { divide(0); }, frame("divide\\(int\\)")},
      Case{SIGABRT, [] { std::abort(); }, frame("run\\(")},
      Case{SIGABRT,
           [] { std::thread([] { throw std::runtime_error("nobody catches this"); }).join(); },
           "SIGABRT"},
      Case{SIGILL, [] { __builtin_trap(); }, "SIG(ILL|TRAP)"},
      Case{SIGBUS,
           [] {
             const int file = ::memfd_create("short", MFD_CLOEXEC);
             read_from(static_cast<int*>(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file, 0)));
           },
           frame("read_from\\(int const volatile\\*\\)")},
      Case{SIGSEGV, [] { ::raise(SIGSEGV); }, frame("run\\(")},
  };
  for (const Case& one : cases) {
    const auto ended = run([&] {
      crash::report_crashes();
      one.body();
    });
    EXPECT_EQ(signal_of(ended), one.signal) << ended.text;
    EXPECT_THAT(ended.text, ContainsRegex(one.text));
  }
}

TEST_F(Crash, NamesTheSenderOfTheSignal) {
  const pid_t sender = ::getpid();
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe2(ready.data(), O_CLOEXEC), 0);
  std::thread killer([&] {
    pid_t process = 0;
    ASSERT_EQ(::read(ready[0], &process, sizeof process), static_cast<ssize_t>(sizeof process));
    ::kill(process, SIGABRT);
  });
  const auto ended = run([&] {
    crash::report_crashes();
    const pid_t self = ::getpid();
    [[maybe_unused]] const auto written = ::write(ready[1], &self, sizeof self);
    for (;;) ::pause();
  });
  killer.join();
  EXPECT_EQ(signal_of(ended), SIGABRT);
  EXPECT_THAT(ended.text, HasSubstr(", sent by process " + std::to_string(sender) + "\n"));
}

TEST_F(Crash, IsReportedAfterAStackOverflow) {
  for (const bool in_thread : {false, true}) {
    const auto ended = run([=] {
      crash::report_crashes();
      if (!in_thread) recurse(0);
      std::thread([] {
        crash::prepare_thread();
        recurse(0);
      }).join();
    });
    EXPECT_EQ(signal_of(ended), SIGSEGV);
    EXPECT_THAT(ended.text, HasSubstr(": the thread's stack has overflowed\n"));
    EXPECT_THAT(ended.text, ContainsRegex("#20 .*" + frame("recurse\\(int\\)")));
    EXPECT_THAT(ended.text, HasSubstr("(more frames follow)"));
  }
}

TEST_F(Crash, NamesTheCallerOfANullFunction) {
  const auto ended = run([] {
    crash::report_crashes();
    volatile Function nothing = nullptr;
    call(nothing);
  });
  EXPECT_EQ(signal_of(ended), SIGSEGV);
  EXPECT_THAT(ended.text, HasSubstr("#0 0x0 (nothing is mapped there)"));
  EXPECT_THAT(ended.text, ContainsRegex("#1 .*" + frame("call\\(int \\(\\*\\)\\(\\)\\)")));
}

// The test overwrites malloc()'s bookkeeping beside a block. malloc() notices, and ends the process
// while it holds its own lock.
TEST_F(Crash, IsReportedWithADamagedHeap) {
  const auto ended = run([] {
    crash::report_crashes();
    std::thread([] {}).join();  // from here on malloc() locks
    auto* const block = static_cast<char*>(std::malloc(2000));
    volatile std::size_t bytes = 3000;
    std::memset(block, 0x41, bytes);
    for (int times = 0; times < 100'000; ++times) {
      std::free(std::malloc(static_cast<std::size_t>(1000 + times)));
    }
    std::free(block);
  });
  EXPECT_TRUE(signal_of(ended) == SIGABRT || signal_of(ended) == SIGSEGV) << ended.status;
  EXPECT_THAT(ended.text, ContainsRegex("crashed in thread '.*': SIG(ABRT|SEGV)"));
  EXPECT_THAT(ended.text, ContainsRegex(frame("run\\(")));
  EXPECT_THAT(ended.text, Not(HasSubstr("could not be read")));
}

TEST_F(Crash, SeveralThreadsGiveOneReport) {
  const auto ended = run([] {
    crash::report_crashes();
    std::array<std::thread, 8> threads;
    for (std::thread& thread : threads) thread = std::thread([] { read_from(nullptr); });
    for (std::thread& thread : threads) thread.join();
  });
  EXPECT_EQ(signal_of(ended), SIGSEGV);
  const auto first = ended.text.find("crashed in thread");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(ended.text.find("crashed in thread", first + 1), std::string::npos) << ended.text;
}

TEST_F(Crash, KeepsTheProcessExitStatus) {
  // The status says whether the system wrote a core dump.
  const auto ended = [](bool with_report) {
    const pid_t process = ::fork();
    if (process == 0) {
      const int nothing = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
      ::dup2(nothing, STDERR_FILENO);
      if (::chdir("/tmp") != 0) ::_exit(1);
      if (with_report) crash::report_crashes();
      ::abort();
    }
    int status = 0;
    ::waitpid(process, &status, 0);
    return status;
  };
  EXPECT_EQ(ended(true), ended(false));
}

TEST_F(Crash, LeavesHandledSignalsAlone) {
  const auto own = [](int) { ::_exit(9); };
  const auto before = run([=] {
    std::signal(SIGSEGV, own);
    crash::report_crashes();
    read_from(nullptr);
  });
  EXPECT_TRUE(WIFEXITED(before.status) && WEXITSTATUS(before.status) == 9);
  const auto after = run([=] {
    crash::report_crashes();
    std::signal(SIGSEGV, own);
    read_from(nullptr);
  });
  EXPECT_TRUE(WIFEXITED(after.status) && WEXITSTATUS(after.status) == 9);
  const auto ignored = run([] {
    std::signal(SIGABRT, SIG_IGN);
    crash::report_crashes();
    ::raise(SIGABRT);
  });
  EXPECT_EQ(ignored.status, 0);
  for (const auto& ended : {before, after, ignored}) EXPECT_EQ(ended.text, "");
}

TEST_F(Crash, IsNotReportedWhenTurnedOff) {
  for (const bool asked : {false, true}) {
    const auto ended = run([=] {
      ::setenv("WEFT_CRASH_TRACE", "off", 1);
      if (asked) crash::report_crashes();
      read_from(nullptr);
    });
    EXPECT_EQ(signal_of(ended), SIGSEGV);
    EXPECT_EQ(ended.text, "");
  }
}

TEST_F(Crash, RunsItsHookAndReportsTheHooksCrash) {
  const auto written = run([] {
    crash::report_crashes();
    crash::at_crash(
        [](const char* reason) { return ::write(STDERR_FILENO, reason, std::strlen(reason)) > 0; });
    read_from(nullptr);
  });
  EXPECT_THAT(written.text, HasSubstr("\nSIGSEGV, invalid access to memory"));
  const auto failed = run([] {
    crash::report_crashes();
    crash::at_crash([](const char*) { return read_from(nullptr) == 0; });
    read_from(nullptr);
  });
  EXPECT_EQ(signal_of(failed), SIGSEGV);
  EXPECT_THAT(failed.text, HasSubstr("weft: the flight recorder was not written\n"));
}

}  // namespace
}  // namespace weft
