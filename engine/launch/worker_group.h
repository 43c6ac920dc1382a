// The ranks of one round on this machine: starts them, forwards what they write, waits for the
// first failure or the end, and ends them with all that they have started. Used by weft-run's one
// thread.
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
  // Starts the ranks. Throws Busy where that fails; those that are started are ended then.
  WorkerGroup(const Options& options, const Rendezvous::Place& place);

  struct Failure {
    int code = 0;     // as shells count: 128 + the signal's number
    std::string why;  // "rank 3 failed first: exit code 3"
    bool is_consequence =
        false;  // of what happened to ranks of other machines, by the words of all that failed here
  };

  // Forwards output for a moment. Nothing where no rank has failed meanwhile; else ends all, and
  // says on stderr what happened.
  std::optional<Failure> supervise();
  // Whether ranks are left.
  bool runs() const { return !children_.running().empty(); }
  // errno of the first write that failed.
  int write_failure() const { return write_failure_; }

  // Ends the ranks and what they have started.
  void end();
  // The same, as the signal says that weft-run has received. A Ctrl-C after it cuts the grace
  // short.
  void end_on_signal(int number);
  // All ranks have ended well: forwards the rest, and ends what they have left behind.
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
  // Moves what the ranks have written, for at most so long as nothing comes.
  void forward_output(std::chrono::milliseconds patience);
  void note_failure(const Output& output);
  Children::Ended wait_for_end();
  // Forwards output while waiting, at most until the deadline; the next failure, or process 0.
  Children::Ended next_failure(Deadline deadline);
  Failure report(Children::Ended first);
  // What ranks that hang were doing, before they are ended.
  void ask_for_dumps();
  // Forwards output meanwhile.
  void end_children(std::chrono::milliseconds patience);
  std::chrono::seconds grace() const { return std::chrono::seconds(options_.grace_seconds); }

  const Options& options_;
  const Rendezvous::Place place_;
  std::vector<std::unique_ptr<Output>> outputs_;
  std::map<pid_t, Rank> ranks_;
  std::vector<int> ended_well_;  // ranks that had ended with exit code 0 before the first failure
  Children children_{Reach::Descendants};
  std::optional<StatusLine> status_;
  int write_failure_ = 0;
};

}  // namespace weft::launch
