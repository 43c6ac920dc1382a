// SPDX-License-Identifier: Apache-2.0
// The ranks of one round on this machine: starts them, forwards their output, waits for the first
// failure or the end, and ends them and all processes that they have started. Used by weft-run's
// one thread.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include <weft/base/deadline.h>
#include <weft/engine/launch/options.h>
#include <weft/engine/launch/output.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/rendezvous.h>
#include <weft/engine/launch/status.h>

namespace weft::launch {

class WorkerGroup {
 public:
  // Starts the ranks. Throws Busy if that fails, and ends those that it has started.
  WorkerGroup(const Options& options, const Rendezvous::Assignment& place);

  struct Failure {
    // As a shell gives it: the exit code, or 128 + the signal's number.
    int code = 0;
    std::string why;  // "rank 3 failed first: exit code 3"
    // Every rank that failed here reports that it lost another rank, so the cause is on another
    // machine.
    bool is_consequence = false;
  };

  // Forwards output for a moment. Returns nothing if no rank has failed meanwhile; otherwise ends
  // all ranks and describes the failure on stderr.
  std::optional<Failure> supervise();
  // Whether any rank still runs.
  bool runs() const { return !children_.running().empty(); }
  // errno of the first write that failed, or 0.
  int write_failure() const { return write_failure_; }

  // Ends the ranks and the processes that they have started.
  void end();
  // The same after weft-run has received the signal `number`. A later Ctrl-C cuts the grace short.
  void end_on_signal(int number);
  // After all ranks have ended well: forwards the rest of their output, and ends the processes that
  // they have left behind.
  void clean_up();

 private:
  struct Rank {
    int rank = 0;
    pid_t process = 0;
    const Output* error = nullptr;
  };

  static void show(const std::string& status);
  void set_environment(int local) const;
  void start(int local);
  Output::Log log_of(int local, int to) const;
  const Output* add_output(int local, Descriptor from, int to);
  // Forwards the ranks' output; waits up to `patience` for some.
  void forward_output(std::chrono::milliseconds patience);
  void note_failure(const Output& output);
  Children::Ended wait_for_end();
  // Forwards output until a rank fails or the deadline passes; returns the failure, or process 0.
  Children::Ended next_failure(Deadline deadline);
  Failure report(Children::Ended first);
  // Asks ranks that may hang for dumps of their operations, before they are ended.
  void ask_for_dumps();
  // Ends the ranks and forwards their output meanwhile.
  void end_children(std::chrono::milliseconds patience);
  std::chrono::seconds grace() const { return std::chrono::seconds(options_.grace_seconds); }

  const Options& options_;
  const Rendezvous::Assignment place_;
  std::vector<std::unique_ptr<Output>> outputs_;
  std::map<pid_t, Rank> ranks_;
  // Ranks that had ended with exit code 0 before the first failure.
  std::vector<int> ended_well_;
  Children children_{Reach::Descendants};
  std::optional<StatusLine> status_;
  int write_failure_ = 0;
};

}  // namespace weft::launch
