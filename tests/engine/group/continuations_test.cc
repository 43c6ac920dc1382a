// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/engine/group/continuations.h>
#include <weft/tests/harness/no_more_threads.h>

namespace weft::group {
namespace {

// A backend that completes an operation must not fail because no thread can be started.
TEST(Continuations, RunInlineIfNoThreadCanStart) {
  const log::Capture capture([](LogLevel, std::string_view) {});
  const harness::NoMoreThreads no_more;
  if (harness::can_make_threads())
    GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
  const auto home = std::make_shared<Continuations>();
  int ran = 0;
  for (int times = 0; times < 2; ++times) home->run(Task([&] { ++ran; }));
  EXPECT_EQ(ran, 2);
  home->stop(/*waits=*/true);
}

}  // namespace
}  // namespace weft::group
