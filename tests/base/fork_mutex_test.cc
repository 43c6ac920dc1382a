// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>

namespace weft {
namespace {

constinit ForkMutex outer(ForkOrder::Engine);
constinit ForkMutex inner(ForkOrder::Log);
int half_of_pair = 0;  // equals other_half, unless a thread holds `outer`
int other_half = 0;

// Forks again and again while other threads run `work`. Each child runs `in_child` and has 20 s.
void fork_beside(const std::function<void()>& work, const std::function<bool()>& in_child) {
  std::atomic<bool> is_over{false};
  std::array<std::thread, 2> others;
  for (std::thread& other : others) {
    other = std::thread([&] {
      for (; !is_over; std::this_thread::yield()) work();
    });
  }
  for (int round = 0; round < 50; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // ends a child that blocks for ever
      ::_exit(in_child() ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << "in round " << round;
    if (status != 0) break;
  }
  is_over = true;
  for (std::thread& other : others) other.join();
}

TEST(ForkMutex, IsFreeInAChildWithWholeData) {
  fork_beside(
      [] {
        const std::lock_guard lock(outer);
        ++half_of_pair;
        const std::lock_guard second(inner);
        ++other_half;
      },
      [] {
        const std::lock_guard lock(outer);
        const std::lock_guard second(inner);
        return half_of_pair == other_half;
      });
  EXPECT_EQ(half_of_pair, other_half);
}

TEST(ForkMutex, IsFreeInAGrandchild) {
  const pid_t child = ::fork();
  if (child == 0) {
    fork_beside([] { const std::lock_guard lock(inner); },
                [] {
                  const std::lock_guard lock(inner);
                  return true;
                });
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Log, ForkedChildCanWrite) {
  const int nothing = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  const int before = ::dup(STDERR_FILENO);
  ::dup2(nothing, STDERR_FILENO);
  fork_beside([] { log::warn("one of the parent's"); },
              [] {
                log::warn("one of the child's");
                return true;
              });
  ::dup2(before, STDERR_FILENO);
  ::close(before);
  ::close(nothing);
}

TEST(Log, ForkedChildCanCapture) {
  std::atomic<int> lines{0};
  const log::Capture capture([&](LogLevel, std::string_view) { ++lines; });
  fork_beside([] { log::info("one of the parent's"); },
              [&] {
                const int there = lines;
                log::info("one of the child's");
                return lines == there + 1;
              });
}

}  // namespace
}  // namespace weft
