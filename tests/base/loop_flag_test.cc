// SPDX-License-Identifier: Apache-2.0
#include <future>
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/loop_flag.h>

namespace weft {
namespace {

Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

TEST(LoopFlag, BlockedCallerDrivesTheLoop) {
  const auto loop = std::make_shared<EventLoop>("test");
  const auto flag = std::make_shared<LoopFlag>(loop);
  const auto caller = std::this_thread::get_id();
  // Posts itself again until it runs on the caller's thread, which is blocked on the flag.
  std::function<void()> step = [&] {
    if (std::this_thread::get_id() == caller) {
      flag->raise();
    } else {
      loop->post(step);
    }
  };
  loop->post(step);
  EXPECT_TRUE(Fence(flag).synchronize(patience()));
}

// This happens where one thread handles the message that another one waits for.
TEST(LoopFlag, RaiseOutsideTheLoopWakesDrivers) {
  for (int blocked = 1; blocked <= 2; ++blocked) {
    const auto loop = std::make_shared<EventLoop>("test");
    const auto flag = std::make_shared<LoopFlag>(loop);
    std::vector<std::future<bool>> passed;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < blocked; ++i) {
      passed.push_back(
          std::async(std::launch::async, [&] { return Fence(flag).synchronize(patience()); }));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they sleep by now
    flag->raise();
    for (auto& one : passed) EXPECT_TRUE(one.get());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30))
        << "they woke at the deadline only";
  }
}

TEST(LoopFlag, GivesUpAtTheDeadline) {
  const auto loop = std::make_shared<EventLoop>("test");
  EXPECT_FALSE(Fence(std::make_shared<LoopFlag>(loop))
                   .synchronize(Deadline::in(std::chrono::milliseconds(5))));
}

TEST(LoopFlag, StillWorksWhenTheLoopIsGone) {
  auto loop = std::make_shared<EventLoop>("test");
  const auto flag = std::make_shared<LoopFlag>(loop);
  loop.reset();
  EXPECT_FALSE(Fence(flag).synchronize(Deadline::in(std::chrono::milliseconds(5))));
  std::thread raiser([&] { flag->raise(); });
  EXPECT_TRUE(Fence(flag).synchronize(patience()));
  raiser.join();
}

TEST(LoopFlag, SynchronizeInsideItsLoopReturns) {
  const auto loop = std::make_shared<EventLoop>("test");
  const auto flag = std::make_shared<LoopFlag>(loop);
  std::promise<bool> before;
  std::promise<bool> after;
  loop->post([&] {
    before.set_value(Fence(flag).synchronize());
    flag->raise();
    after.set_value(Fence(flag).synchronize());
  });
  EXPECT_FALSE(before.get_future().get());
  EXPECT_TRUE(after.get_future().get());
}

}  // namespace
}  // namespace weft
