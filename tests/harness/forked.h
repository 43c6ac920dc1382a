// SPDX-License-Identifier: Apache-2.0
// Children that a test forks from a process that has agents or groups.
#pragma once

#include <csignal>
#include <cstdlib>
#include <functional>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/tests/harness/ranks.h>

namespace weft::harness {

// Runs `body` in a forked child, which then ends by exit(). Fails the test unless the child
// succeeds within a time limit.
inline void expect_child_to_end_well(const std::function<void()>& body) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the child threw: " << error.what();
    }
    std::exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  const bool has_ended = comes_true([&] { return ::waitpid(child, &status, WNOHANG) == child; });
  if (!has_ended) {
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
  }
  EXPECT_TRUE(has_ended) << "the child hangs";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace weft::harness
