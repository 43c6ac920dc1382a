#include <future>
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/loop_flag.h>

namespace weft {
namespace {

Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

TEST(LoopFlag, WhoBlocksOnItTurnsTheLoop) {
  const auto loop = std::make_shared<EventLoop>("test");
  const auto flag = std::make_shared<LoopFlag>(loop);
  const auto caller = std::this_thread::get_id();
  // Goes round until it runs on the caller's thread, which is blocked on the flag.
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

TEST(LoopFlag, GivesUpAtTheDeadline) {
  const auto loop = std::make_shared<EventLoop>("test");
  EXPECT_FALSE(Fence(std::make_shared<LoopFlag>(loop)).synchronize(Deadline::in(std::chrono::milliseconds(5))));
}

TEST(LoopFlag, BlocksAsAnyFlagWhenTheLoopIsGone) {
  auto loop = std::make_shared<EventLoop>("test");
  const auto flag = std::make_shared<LoopFlag>(loop);
  loop.reset();
  EXPECT_FALSE(Fence(flag).synchronize(Deadline::in(std::chrono::milliseconds(5))));
  std::thread raiser([&] { flag->raise(); });
  EXPECT_TRUE(Fence(flag).synchronize(patience()));
  raiser.join();
}

TEST(LoopFlag, InsideTheLoopItSaysAtOnceThatItHasNotPassed) {
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
