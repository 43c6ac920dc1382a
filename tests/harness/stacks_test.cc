// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/tests/harness/stacks.h>

namespace weft::harness {
namespace {

TEST(Stacks, EachThreadSaysWhereItStands) {
  prepare_stacks();
  std::atomic<bool> over{false};
  std::atomic<int> thread{0};
  std::thread waits([&] {
    thread = ::gettid();
    while (!over) ::usleep(1000);
  });
  while (thread == 0) std::this_thread::yield();
  // The output of one thread, up to the next one's.
  std::string text;
  const auto said_by = [&text](int which) {
    const auto from = text.find("thread " + std::to_string(which) + "\n");
    if (from == std::string::npos) return std::string();
    return text.substr(from, text.find("thread ", from + 1) - from);
  };
  const auto says_where = [&] {  // between two sleeps the thread is elsewhere
    testing::internal::CaptureStderr();
    print_stacks();
    text = testing::internal::GetCapturedStderr();
    return said_by(thread).find("usleep") != std::string::npos;
  };
  EXPECT_TRUE(comes_true(says_where)) << text;
  EXPECT_NE(said_by(::gettid()).find("stacks_test(+0x"), std::string::npos) << text;
  over = true;
  waits.join();
}

}  // namespace
}  // namespace weft::harness
