// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iterator>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/process_tree.h>

namespace weft::launch {

namespace {

// False for a child that other code has reaped: its number may be another process's by now.
bool is_child(pid_t process) {
  siginfo_t ignored;
  return ::waitid(P_PID, static_cast<id_t>(process), &ignored, WEXITED | WNOHANG | WNOWAIT) == 0 ||
         errno != ECHILD;
}

}  // namespace

std::string describe_status(int status) {
  if (status == kTakenStatus)
    return "a status that something else in this process took (a SIGCHLD handler, wait())";
  if (WIFEXITED(status)) return "exit code " + std::to_string(WEXITSTATUS(status));
  return "signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
}

Children::Children(Reach reach) : reach_(reach) {
  if (reach_ != Reach::Children) ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Children::~Children() { end_all(std::chrono::seconds(2)); }

std::vector<pid_t> Children::reached() const {
  std::vector<pid_t> own;
  std::copy_if(processes_.begin(), processes_.end(), std::back_inserter(own), is_child);
  if (reach_ == Reach::Children) return own;
  siginfo_t child;
  if (::waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) != 0) return {};  // no child at all
  std::set<pid_t> known(own.begin(), own.end());
  known.insert(signalled_.begin(), signalled_.end());
  std::vector<pid_t> reached = descendants(known, reach_ == Reach::Sessions);
  // Without /proc, at least the children.
  for (const pid_t process : own) {
    if (std::find(reached.begin(), reached.end(), process) == reached.end())
      reached.push_back(process);
  }
  return reached;
}

// One look at /proc may miss a process whose parent ends meanwhile: the look reads it as a child of
// that parent, but this process has adopted it by then.
bool Children::have_ended() const {
  constexpr int kLooks = 3;
  for (int look = 0; look < kLooks; ++look) {
    if (!reached().empty()) return false;
  }
  return true;
}

// Reaps ended children; returns one that was added, or process 0.
Children::Ended Children::reap() {
  if (reach_ != Reach::Children) {
    for (;;) {
      int status = 0;
      const pid_t process = ::waitpid(-1, &status, WNOHANG);
      if (process <= 0) break;
      if (std::erase(processes_, process) > 0) return {process, status};  // otherwise an orphan
    }
  }
  for (const pid_t process : processes_) {
    int status = 0;
    const pid_t reaped = ::waitpid(process, &status, WNOHANG);
    if (reaped == 0 || (reaped < 0 && errno != ECHILD)) continue;
    std::erase(processes_, process);
    return {process, reaped < 0 ? kTakenStatus : status};
  }
  return {};
}

Children::Ended Children::wait(std::chrono::milliseconds patience, int other) {
  const Deadline deadline = Deadline::in(patience);
  while (!processes_.empty()) {
    if (const Ended ended = reap(); ended.process != 0) return ended;
    std::vector<pollfd> watched{{other, POLLIN, 0}};
    for (const pid_t process : processes_) {
      const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
      if (descriptor >= 0) watched.push_back({descriptor, POLLIN, 0});
    }
    const auto left = std::min(deadline.remaining(), std::chrono::milliseconds(1000));
    // A pidfd becomes readable when its process ends. Without pidfds (old kernels), looks again
    // soon.
    const bool all_watched = watched.size() == processes_.size() + 1;
    const auto limit = all_watched ? left : std::min(left, std::chrono::milliseconds(10));
    ::poll(watched.data(), watched.size(), static_cast<int>(limit.count()));
    std::for_each(watched.begin() + 1, watched.end(), [](const pollfd& item) { ::close(item.fd); });
    if (deadline.passed() || watched.front().revents != 0) break;
  }
  return {};
}

void Children::signal_all(int number) {
  for (const pid_t process : reached()) {
    ::kill(process, number);
    // A wrapper may die of the signal before a process that it has started in a session of its own.
    signalled_.insert(process);
  }
}

int Children::signal_who_catch(int number) const {
  int count = 0;
  for (const pid_t process : reached()) {
    if (catches(process, number) && ::kill(process, number) == 0) ++count;
  }
  return count;
}

void Children::end_all(std::chrono::milliseconds grace, const std::function<bool()>& hurry,
                       const std::function<void()>& meanwhile) {
  if (have_ended()) return;
  signal_all(SIGTERM);
  signal_all(SIGCONT);  // a stopped process sees no SIGTERM
  const auto wait_a_moment = [&](std::chrono::milliseconds longest) {
    // Nothing reports the end of a process that is not a child: looks again soon.
    constexpr auto kSoon = std::chrono::milliseconds(10);
    if (reach_ != Reach::Children || meanwhile) longest = std::min(longest, kSoon);
    if (!processes_.empty()) {
      wait(longest);
    } else {
      reap();
      ::poll(nullptr, 0, static_cast<int>(longest.count()));
    }
    if (meanwhile) meanwhile();
  };
  const Deadline deadline = Deadline::in(grace);
  const auto is_over = [&] { return deadline.passed() || (hurry && hurry()); };
  while (!have_ended() && !is_over()) wait_a_moment(deadline.remaining());
  // A process that a child has started may belong to another user (sudo); signals do not end it.
  const Deadline last = Deadline::in(std::chrono::seconds(5));
  while (!processes_.empty() || (!have_ended() && !last.passed())) {
    signal_all(SIGKILL);
    wait_a_moment(std::chrono::seconds(1));
  }
}

}  // namespace weft::launch
