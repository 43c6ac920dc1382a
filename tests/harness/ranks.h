// SPDX-License-Identifier: Apache-2.0
// Ranks for tests: N threads of this process, or N forked processes, run one body. The test fails
// if a body throws, if any rank has a gtest failure, if an unexpected error is logged, or if the
// run exceeds its time limit.
//
// libtorch's thread pools do not survive a fork, so a test that forks must do so before it uses
// tensors itself. (ctest runs each test in a separate process.)
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <weft/base/log.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/launch/process.h>

namespace weft::harness {

// How long a run of ranks may take before it counts as hung. The process then prints which ranks it
// waited for, and aborts.
constexpr auto kLimit = std::chrono::seconds(60);

// While it lives, fails the test for every error in the log, except those that contain an allowed
// text.
class LogWatch {
 public:
  LogWatch();
  ~LogWatch();
  LogWatch(const LogWatch&) = delete;
  LogWatch& operator=(const LogWatch&) = delete;
  void allow(const std::string& text);
  // Returns the warnings and errors logged so far, one per line.
  std::string text() const;
  // The LogWatch of this process while it runs ranks, for their bodies.
  static LogWatch& current();

 private:
  struct Lines;
  std::shared_ptr<Lines> lines_;
  log::Capture capture_;
};

enum class As { Threads, Processes };
inline std::string name(As as) { return as == As::Threads ? "Threads" : "Processes"; }

using Body = std::function<void(ProcessGroup& group)>;

// Runs `body` on each rank of a new group. Threads meet in a HashStore, processes by env://. The
// ranks' device is the CPU unless the options name another.
void run_ranks(As as, int ranks, const Body& body, ProcessGroupOptions options = {});
// Runs body(rank) on one thread for each rank, for bodies that join by themselves.
void run_threads(int ranks, const std::function<void(int rank)>& body);

// Blocks until all ranks have called it and none of them is still inside an operation of the group
// (after a barrier, some may be).
void meet(ProcessGroup& group);

// Forked processes that the test may stop and kill. Each first sets RANK, LOCAL_RANK, WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT.
class Processes {
 public:
  Processes(int ranks, const std::function<void(int rank)>& body);
  // Kills the processes that still run.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Called inside a rank: tells the test that the rank has come this far.
  static void say(const std::string& word);
  // Blocks until the rank has said a word that was not yet returned. Throws if the rank ended
  // without one.
  std::string next_word(int rank);
  // Blocks until the rank has said this word; throws like next_word().
  void wait_for(int rank, const std::string& word);
  pid_t process(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)).process; }
  void signal(int rank, int number);
  // Blocks until all ranks except these have ended. Fails the test for each that did not succeed.
  void expect_success(const std::set<int>& but = {});

 private:
  struct Rank {
    pid_t process = 0;
    int from = -1;     // the pipe on which it says words, one per line
    std::string said;  // said but not yet taken
    bool running = true;
  };
  std::vector<Rank> ranks_;
  launch::Children children_;
};

// Unsets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in this process, for a rank that is told
// otherwise where it joins.
void unset_rank_variables();

// Polls `condition` until it is true or the limit passes; returns it. For changes that other
// threads or workers make.
bool comes_true(const std::function<bool()>& condition,
                std::chrono::seconds limit = std::chrono::seconds(20));

// Runs `call`, which must throw an Error, and returns that error. Anything else fails the test and
// returns a Cancelled error.
Error error_of(const std::function<void()>& call);

}  // namespace weft::harness
