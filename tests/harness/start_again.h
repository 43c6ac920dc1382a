// SPDX-License-Identifier: Apache-2.0
// For a test with several processes whose first one has used CUDA and so must not fork: it starts
// its program again with only the same test. The new process learns from its environment that it is
// one of the others.
#pragma once

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <spawn.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>

namespace weft::harness {

// Starts this program again. Its output goes to `log`; `more_variables` ("NAME=value") are added to
// this process's own. `tests` is a filter of GoogleTest; if empty, the current test. Throws Busy.
inline pid_t start_again(const std::string& log, const std::vector<std::string>& more_variables,
                         const std::string& tests = {}) {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter =
      "--gtest_filter=" +
      (tests.empty() ? std::string(test->test_suite_name()) + "." + test->name() : tests);
  std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::array<char*, 3> arguments{program.data(), const_cast<char*>(filter.data()), nullptr};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable)
    variables.emplace_back(*variable);
  variables.insert(variables.end(), more_variables.begin(), more_variables.end());
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(),
                                   O_CREAT | O_WRONLY | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t process = 0;
  const int failed = posix_spawn(&process, program.c_str(), &actions, nullptr, arguments.data(),
                                 environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw system_error(Blame::Busy, "starting " + program, failed);
  return process;
}

inline std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace weft::harness
