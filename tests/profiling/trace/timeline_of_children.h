// SPDX-License-Identifier: Apache-2.0
// Timelines whose ranks are child processes of the test, run one after the other.
#pragma once

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/tests/harness/folder.h>

namespace weft::trace {

using Json = nlohmann::json;

constexpr const char* kJob = "0123456789abcdef";

class Timeline : public testing::Test {
 protected:
  // Runs `body` as a rank in a process of its own.
  void run(int rank, int ranks, const std::function<void()>& body, timeline::Clock clock = {}) {
    const pid_t child = ::fork();
    if (child == 0) {
      timeline::join(file_, {kJob, rank, ranks, clock});
      body();
      timeline::finish();
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }

  Json read() const {
    std::ifstream stream(file_);
    return Json::parse(stream);
  }
  static std::vector<Json> events(const Json& json, const std::string& phase) {
    std::vector<Json> found;
    for (const Json& event : json.at("traceEvents")) {
      if (event.at("ph") == phase) found.push_back(event);
    }
    return found;
  }

  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
  const std::string file_ = folder_ + "/run.json";
};

inline Member member(int rank, int ranks) {
  MemberIdentity party{"group", "default", rank, {}};
  for (int i = 0; i < ranks; ++i) party.ranks.push_back(i);
  return Member::join(party);
}

}  // namespace weft::trace
