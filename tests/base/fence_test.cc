// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/base/fence.h>

namespace weft {
namespace {

using std::chrono::milliseconds;

TEST(Fence, EmptyHasPassed) {
  const Fence fence;
  EXPECT_TRUE(fence.query());
  EXPECT_TRUE(fence.synchronize(Deadline::in(milliseconds(0))));
}

TEST(HostFlag, PassesWhenRaisedAndStaysPassed) {
  auto flag = std::make_shared<HostFlag>();
  const Fence fence(flag);
  EXPECT_FALSE(fence.query());
  EXPECT_FALSE(fence.synchronize(Deadline::in(milliseconds(1))));
  flag->raise();
  flag->raise();
  EXPECT_TRUE(fence.query());
  EXPECT_TRUE(fence.synchronize());
}

TEST(HostFlag, WakesEveryBlockedThread) {
  auto flag = std::make_shared<HostFlag>();
  std::atomic<int> passed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, fence = Fence(flag)] {
      passed += fence.synchronize(Deadline::in(std::chrono::seconds(30)));
    });
  }
  flag->raise();
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(passed, 4);
}

TEST(HostFlag, RunsEarlyAndLateTasksOnce) {
  HostFlag flag;
  int before = 0;
  int after = 0;
  Task first([&] { ++before; });
  EXPECT_TRUE(flag.on_passed(first));
  EXPECT_EQ(before, 0);
  flag.raise();
  EXPECT_EQ(before, 1);
  Task second([&] { ++after; });
  EXPECT_TRUE(flag.on_passed(second));
  EXPECT_EQ(after, 1);
  flag.raise();
  EXPECT_EQ(before, 1);
}

TEST(HostFlag, TaskMayRegisterAnother) {
  HostFlag flag;
  bool inner = false;
  Task outer([&] {
    Task more([&] { inner = true; });
    flag.on_passed(more);
  });
  flag.on_passed(outer);
  flag.raise();
  EXPECT_TRUE(inner);
}

// A flag on a word with another owner, like the flags of cuda::FlagPool.
struct SharedWordFlag : HostFlag {
  SharedWordFlag(std::atomic<std::uint32_t>& word, std::uint32_t value) : HostFlag(&word, value) {}
};

TEST(HostFlag, SharedWordPassesAtItsValueAndLater) {
  std::atomic<std::uint32_t> word{0xfffffffe};
  SharedWordFlag last(word, 0xffffffff);
  SharedWordFlag wrapped(word, 0);
  EXPECT_FALSE(last.query());
  EXPECT_FALSE(wrapped.query());
  last.raise();
  EXPECT_TRUE(last.query());
  EXPECT_FALSE(wrapped.query());
  wrapped.raise();
  EXPECT_EQ(word, 0u);
  EXPECT_TRUE(wrapped.query());
  EXPECT_TRUE(last.query()) << "a later value must not take back an earlier flag";
}

TEST(HostFlag, SharedWordWakesItsSleeper) {
  std::atomic<std::uint32_t> word{6};
  SharedWordFlag flag(word, 7);
  std::thread sleeper(
      [&] { EXPECT_TRUE(flag.synchronize(Deadline::in(std::chrono::seconds(30)))); });
  flag.raise();
  sleeper.join();
}

}  // namespace
}  // namespace weft
