// Child processes: what spawn and weft-run share.
#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <sys/types.h>

namespace weft::launch {

// A TCP port that is free at this moment, below those that the kernel gives to whoever connects: a
// job that starts slowly still finds it free. Throws Busy.
int free_port();

// The status of a child that something else in this process has waited for: a SIGCHLD handler, or a
// thread in wait().
constexpr int kTakenStatus = -1;

// "exit code 3", "signal 9 (Killed)".
std::string describe_status(int status);

// Whom a signal to a job's children goes to.
enum class Reach {
  Children,     // those that were added
  Descendants,  // also what they have started. This process then adopts orphans and reaps every
                // child it has.
  Sessions,     // of the descendants also orphans that have made sessions of their own
};

// The children of one job.
class Children {
 public:
  explicit Children(Reach reach = Reach::Children);
  // Ends what still runs: SIGTERM, then after `grace` SIGKILL, and reaps it.
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t process) { processes_.push_back(process); }
  const std::vector<pid_t>& running() const { return processes_; }
  // The same, and what they have started, as far as this object reaches.
  std::vector<pid_t> reached() const;
  // Whether none of those runs any more.
  bool have_ended() const;
  struct Ended {
    pid_t process = 0;
    int status = 0;  // or kTakenStatus
  };
  // Blocks until a child ends or the time is over (process 0 then), or until there is something to
  // read from the descriptor `other` where one is given. Only children that were added count.
  Ended wait(std::chrono::milliseconds patience, int other = -1);
  // What it has reached once it reaches also when it is an orphan in a session of its own.
  void signal_all(int number);
  // Only to those that handle the signal: the others, such as a shell around the program, would die
  // of it. Returns how many there are.
  int signal_who_catch(int number) const;
  // SIGTERM, then after `grace`, or once `hurry` says so, SIGKILL. `meanwhile` is called every 10
  // ms until all have ended: who writes to a pipe that nobody reads cannot end by itself.
  void end_all(std::chrono::milliseconds grace, const std::function<bool()>& hurry = {},
               const std::function<void()>& meanwhile = {});

 private:
  Ended reap();

  const Reach reach_;
  std::vector<pid_t> processes_;
  std::set<pid_t> signalled_;
};

}  // namespace weft::launch
