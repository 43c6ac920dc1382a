// SPDX-License-Identifier: Apache-2.0
// Ranks that share one GPU, as separate processes, because ranks in one process would block each
// other there: a stream that waits for a rank also holds up libtorch's default stream and its one
// thread for a GPU's gradients, which all ranks of a process share; and a thread that waits inside
// the driver keeps all other threads out of it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/engine/launch/process.h>
#include <weft/tests/harness/folder.h>

namespace weft::harness {

// Runs this program again, once for each rank, for all tests with some name ending, so that each
// process loads its libraries once. The processes run these tests in order, each when this process
// has reached it, and this process reports how it ended.
class Again {
 public:
  struct Options {
    // "NAME=value", added to this process's own.
    std::function<std::vector<std::string>(int rank)> variables = [](int) {
      return std::vector<std::string>();
    };
    std::chrono::seconds limit{60};  // for each test
  };

  // `tests`: the ending of the names of the tests that the ranks run.
  Again(int ranks, std::string tests) : Again(ranks, std::move(tests), Options()) {}
  Again(int ranks, std::string tests, Options options);

  // Call it once in a test. In a rank, calls body(rank, a folder that the ranks share for this
  // test). Elsewhere, starts the ranks if needed and waits until they have finished this test; each
  // failure becomes a failure of the current test, with the ranks' output.
  void run(const std::function<void(int rank, const std::string& folder)>& body);
  // True if this process is a rank.
  static bool is_rank();

 private:
  void be(int rank, const std::function<void(int, const std::string&)>& body) const;
  void start();
  void wait_for(const std::string& test);
  void fail(const std::string& why);

  const int ranks_;
  const std::string tests_;
  const Options options_;
  // Set while the ranks run.
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<launch::Children> children_;
  std::vector<pid_t> processes_;
  std::vector<std::optional<int>> ends_;  // exit statuses
};

// Runs the ranks for the current test only.
void run_again(int ranks, const std::function<void(int rank, const std::string& folder)>& body);

}  // namespace weft::harness
