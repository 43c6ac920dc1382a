#include <atomic>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/tests/harness/stacks.h>

namespace weft::harness {
namespace {

// Of a thread that waits in it; the name is looked for.
extern "C" __attribute__((noinline)) void weft_waits_here(std::atomic<bool>& over) {
  while (!over) ::usleep(1000);
}

TEST(Stacks, EachThreadSaysWhereItStands) {
  prepare_stacks();
  std::atomic<bool> over{false};
  std::atomic<int> thread{0};
  std::thread waits([&] {
    thread = ::gettid();
    weft_waits_here(over);
  });
  while (thread == 0) std::this_thread::yield();
  testing::internal::CaptureStderr();
  print_stacks();
  const std::string text = testing::internal::GetCapturedStderr();
  over = true;
  waits.join();
  const auto mine = text.find("thread " + std::to_string(::gettid()) + "\n");
  const auto others = text.find("thread " + std::to_string(thread) + "\n");
  ASSERT_NE(mine, std::string::npos) << text;
  ASSERT_NE(others, std::string::npos) << text;
  // At least main, the framework's, and this; and the sleep, which is libc's.
  EXPECT_NE(text.find("stacks_test(+0x", mine), std::string::npos) << text;
  EXPECT_NE(text.find("usleep", others), std::string::npos) << text;
}

}  // namespace
}  // namespace weft::harness
