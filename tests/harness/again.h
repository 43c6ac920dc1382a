// Ranks that share one GPU: processes of their own, as each GPU wants it. Streams that wait for a
// rank block whoever shares a process with it: libtorch's default stream and its thread for a GPU's
// gradients are one for all, and the driver, where it waits, lets no other thread in.
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

// This program again, once for each rank, for all tests of some name: what a process loads at its
// start is loaded once. The processes run these tests in their order, each when this one has come
// to it, which says how it ended.
class Again {
 public:
  struct Options {
    // "NAME=value", behind this process's own.
    std::function<std::vector<std::string>(int rank)> variables = [](int) {
      return std::vector<std::string>();
    };
    std::chrono::seconds limit{60};  // for each test
  };

  // Of the tests that are to run, those whose name ends so.
  Again(int ranks, std::string tests) : Again(ranks, std::move(tests), Options()) {}
  Again(int ranks, std::string tests, Options options);

  // Once in a test. In a rank calls body(rank, a folder that the ranks share for this test).
  // Elsewhere starts the ranks, if they are not there, and waits for the end of that; each failure
  // is one of the current test's, with what the ranks have printed.
  void run(const std::function<void(int rank, const std::string& folder)>& body);
  // Whether this process is a rank.
  static bool is_rank();

 private:
  void be(int rank, const std::function<void(int, const std::string&)>& body) const;
  void start();
  void wait_for(const std::string& test);
  void fail(const std::string& why);

  const int ranks_;
  const std::string tests_;
  const Options options_;
  // While the ranks run.
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<launch::Children> children_;
  std::vector<pid_t> processes_;
  std::vector<std::optional<int>> ends_;  // their statuses
};

// The only test of that in its program: this one.
void run_again(int ranks, const std::function<void(int rank, const std::string& folder)>& body);

}  // namespace weft::harness
