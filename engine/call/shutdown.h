// SPDX-License-Identifier: Apache-2.0
// Graceful shutdown. The lowest rank decides: the others call it and wait for its reply. Once all
// have called, it asks every worker for its activity, again and again, until two successive rounds
// find all idle and no call issued in between. A call on its way counts as waiting at its caller,
// so no call is on its way then.
//
// Owned by AgentCore. run() blocks, on a thread of the program's own; the other functions do not
// block and are usable from every thread, except where they say "on the loop".
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/patience.h>
#include <weft/engine/call/types.h>
#include <weft/engine/future/future.h>

namespace weft::rpc {

// Counts that show whether an agent is idle. Named on the wire, like Outcome (types.h).
struct Activity {
  std::uint64_t issued = 0;   // calls made so far
  std::uint64_t waiting = 0;  // calls without a reply
  std::uint64_t running = 0;  // functions and continuations
  friend bool operator==(const Activity&, const Activity&) = default;
  WEFT_FIELDS(issued, waiting, running)
};

}  // namespace weft::rpc

namespace weft::call {

class AgentCore;
using rpc::Activity;

class Shutdown {
 public:
  explicit Shutdown(AgentCore& core) : core_(core) {}

  // Waits until nothing is active on any worker, and leaves.
  void run(const Graceful& options);
  bool has_begun() const { return began_; }
  Activity activity() const;

  // --- called by other workers, on the loop
  // Another worker calls shutdown() as well. The future is done when nothing is active on any
  // worker, or fails with the reason why that will not be.
  Future<Outcome> join(int rank, Deadline limit);
  // Whether this worker waits for rank 0's decision about the shutdown.
  bool awaits_verdict() const { return awaits_verdict_; }

  // On rank 0: another worker that waits for it to decide that all are idle.
  struct Waiting {
    Promise<Outcome> verdict;
    Deadline limit = Deadline::never();  // limit of its shutdown()
  };
  // For an agent that leaves: the workers that wait, by rank. The caller answers them.
  std::map<int, Waiting> take_waiting();

 private:
  class Reports;  // the reports of one wait of rank 0
  void shut_down(std::chrono::milliseconds limit, const std::string& what);
  // Waits for the shutdown that another thread has begun.
  void wait_for_other_thread(std::chrono::milliseconds limit, const std::string& what) const;
  void leave_with_others(std::chrono::milliseconds limit);
  Outcome await_verdict(const Future<Outcome>& verdict);
  template <class Body>
  bool answers(const std::vector<int>& ranks);
  void wait_for_own_calls(Deadline deadline);
  void report_held() const;

  // --- rank 0
  // Logs, each time a report is due, which workers wait in shutdown() while this one has not called
  // it. On the loop.
  void report_awaited();
  void wait_until_idle_everywhere(Deadline deadline);
  void wait_until_all_have_called(Deadline deadline, Reports& reports);
  std::vector<Activity> ask_activity(Deadline deadline, const std::string& busy, Reports& reports);
  // Names the workers that are not idle: "worker1 (rank 1) (2 calls wait, 1 function runs)".
  std::string busy_among(const std::vector<Activity>& all);
  // Asks another worker what keeps it from shutdown(); says so if it does not answer.
  std::string doing_of(int rank);
  // The workers that have not called shutdown() yet.
  std::vector<int> missing() const;
  std::string names_of(const std::vector<int>& ranks) const;
  // Why a worker is gone whose shutdown this one decides on.
  Error why_gone(int rank) const;
  void tell_verdict(const Outcome& verdict, Deadline deadline);

  AgentCore& core_;
  std::atomic<bool> began_{false};  // set under mutex_
  std::atomic<bool> awaits_verdict_{false};
  const Promise<void> ended_{nullptr};  // done when the first run() is
  // On rank 0: the times at which to report that others wait in shutdown(), which it has not
  // called. On the loop.
  std::optional<Patience> awaited_here_;
  EventLoop::Registration reports_awaited_;
  mutable Mutex mutex_;
  std::map<int, Waiting> waiting_ WEFT_GUARDED_BY(mutex_);  // by rank
};

}  // namespace weft::call
