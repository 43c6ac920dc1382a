// SPDX-License-Identifier: Apache-2.0
// Child processes, for spawn and weft-run.
#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <sys/types.h>

namespace weft::launch {

// Returns a TCP port that is free at this moment. It is below the range from which the kernel gives
// ports to connecting sockets, and no other process of Weft on this machine chooses it while this
// process, or one that it has forked, lives (at most eight ports: the oldest becomes available
// again). So a job that starts slowly still finds it free. Throws Busy.
int free_port();

// Stands for the status of a child that something else in this process has waited for: a SIGCHLD
// handler, or a thread in wait().
constexpr int kTakenStatus = -1;

// "exit code 3", "signal 9 (Killed)".
std::string describe_status(int status);

// Which processes a signal to a job's children reaches.
enum class Reach {
  Children,  // the children that were added
  // Also the processes that the children have started. This process then adopts orphans and reaps
  // every child that it has.
  Descendants,
  // Also descendants that are orphans in sessions of their own.
  Sessions,
};

// The children of one job.
class Children {
 public:
  explicit Children(Reach reach = Reach::Children);
  // Ends the processes that still run, with SIGTERM and after 2 s with SIGKILL, and reaps them.
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t process) { processes_.push_back(process); }
  const std::vector<pid_t>& running() const { return processes_; }
  // Those of running() and the processes that they have started, as far as `reach` says.
  std::vector<pid_t> reached() const;
  // Whether none of reached() runs any more.
  bool have_ended() const;
  struct Ended {
    pid_t process = 0;
    int status = 0;  // a status of wait(2), or kTakenStatus
  };
  // Blocks until an added child ends, `patience` is over (process is 0 then), or, if `other` is a
  // descriptor, it becomes readable.
  Ended wait(std::chrono::milliseconds patience, int other = -1);
  // Sends the signal to all of reached(). A process that has been signalled once stays reached,
  // also if it becomes an orphan in a session of its own.
  void signal_all(int number);
  // Sends the signal only to processes that handle it: others, such as a shell around the program,
  // would die of it. Returns to how many.
  int signal_who_catch(int number) const;
  // Sends SIGTERM, then SIGKILL after `grace` or as soon as `hurry` returns true. Calls `meanwhile`
  // every 10 ms until all have ended: a process that writes to a full pipe cannot end unless
  // somebody reads it.
  void end_all(std::chrono::milliseconds grace, const std::function<bool()>& hurry = {},
               const std::function<void()>& meanwhile = {});

 private:
  Ended reap();

  const Reach reach_;
  std::vector<pid_t> processes_;
  std::set<pid_t> signalled_;
};

}  // namespace weft::launch
