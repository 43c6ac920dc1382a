// Ranks for tests: one body, run by N threads of this process or by N forked processes. A body that
// throws, a gtest failure on any rank, an unexpected error in the log and a run over its time limit
// all fail the test.
//
// libtorch's thread pools do not survive a fork: a test that forks does so before it uses tensors
// itself. (ctest runs each test in a process of its own.)
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

// How long a run of ranks may take before it counts as hung; the process then says which ranks it
// waited for, and aborts.
constexpr auto kLimit = std::chrono::seconds(60);

// Fails the test for every error in the log while it lives, but for those that contain an allowed
// text.
class LogWatch {
 public:
  LogWatch();
  ~LogWatch();
  LogWatch(const LogWatch&) = delete;
  LogWatch& operator=(const LogWatch&) = delete;
  void allow(const std::string& text);
  // What was logged so far, warnings and worse, one a line.
  std::string text() const;
  // The one of this process, while it runs ranks: for their bodies.
  static LogWatch& current();

 private:
  struct Lines;
  std::shared_ptr<Lines> lines_;
  log::Capture capture_;
};

enum class As { Threads, Processes };
inline std::string name(As as) { return as == As::Threads ? "Threads" : "Processes"; }

using Body = std::function<void(ProcessGroup& group)>;

// Runs body on each rank of a fresh group. Threads meet in a HashStore, processes by env://. The
// ranks' device is the CPU unless the options say otherwise.
void run_ranks(As as, int ranks, const Body& body, ProcessGroupOptions options = {});
// For bodies that join by themselves: body(rank), on a thread each.
void run_threads(int ranks, const std::function<void(int rank)>& body);

// Blocks until all ranks have come here, and none of them is in an operation of the group any more
// (as some may be behind a barrier).
void meet(ProcessGroup& group);

// Forked processes that the test may stop and kill. Each sets RANK, WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT first.
class Processes {
 public:
  Processes(int ranks, const std::function<void(int rank)>& body);
  // Ends what still runs.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Inside a rank: tells the test that it has come so far.
  static void say(const std::string& word);
  // Blocks until the rank has said a word, one that was not returned before. Throws when it ended
  // without.
  std::string next_word(int rank);
  // Blocks until the rank has said the word, and throws as next_word.
  void wait_for(int rank, const std::string& word);
  pid_t process(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)).process; }
  void signal(int rank, int number);
  // Blocks until all but these have ended, and fails the test for each that did not end well.
  void expect_success(const std::set<int>& but = {});

 private:
  struct Rank {
    pid_t process = 0;
    int from = -1;     // what it says, one word a line
    std::string said;  // and not taken yet
    bool running = true;
  };
  std::vector<Rank> ranks_;
  launch::Children children_;
};

// Waits, bounded, for what other threads and workers bring about; whether they do.
bool comes_true(const std::function<bool()>& condition,
                std::chrono::seconds limit = std::chrono::seconds(20));

// Runs `call`, which must throw an Error; returns it. Anything else fails the test and gives a
// Cancelled error.
Error error_of(const std::function<void()>& call);

}  // namespace weft::harness
