// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/crash.h>
#include <weft/base/cuda_variables.h>
#include <weft/base/deadline.h>
#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/spawn.h>
#include <weft/profiling/trace/timeline.h>

namespace weft {

namespace {

// The report of a failure, with blame and text: a failed rank sends it through a pipe to the
// process that watches it, which sends it to the program.
constexpr std::size_t kMaxReport = 64 * 1024;
constexpr std::string_view kWell = "well";  // sent when the functions of all ranks have returned

void tell(int report, std::string_view text) {
  [[maybe_unused]] const auto written = ::write(report, text.data(), text.size());
}

// Three parts: a line with numbers and the file, a line with the ranks, the text.
std::string encode(const Error& error) {
  const Place place = error.place();
  std::ostringstream report;
  report << static_cast<int>(error.blame()) << ' ' << error.native_code() << ' ' << place.line
         << ' ' << place.file << '\n';
  for (const int rank : error.ranks()) report << rank << ' ';
  report << '\n' << error.text();
  return report.str();
}

Error decode(const std::string& report) {
  std::istringstream lines(report), numbers;
  std::string line, file;
  int blame = static_cast<int>(Blame::Remote), native_code = 0, line_number = 0;
  std::getline(lines, line);
  numbers.str(line);
  numbers >> blame >> native_code >> line_number;
  std::getline(numbers >> std::ws, file);
  std::vector<int> ranks;
  std::getline(lines, line);
  numbers = std::istringstream(line);
  for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
  const std::string text(std::istreambuf_iterator<char>(lines), {});
  static Mutex mutex;
  // A Place points to one of them and is never freed.
  static auto* const files WEFT_POINTEE_GUARDED_BY(mutex) = new std::set<std::string>;
  const MutexLock lock(mutex);
  const Place place{files->insert(file).first->c_str(), line_number};
  return Error(static_cast<Blame>(blame), text, native_code, place).with_ranks(std::move(ranks));
}

// The error without the stack trace that c10's exceptions carry at the end of their text.
Error without_stack(const Error& error) {
  return error.with_text(error.text().substr(0, error.text().find("\nException raised from ")));
}

// Must not throw: this process would continue in the parent's code and end its siblings.
[[noreturn]] void run_rank(int rank, int ranks, int port, int report,
                           const std::function<void(int, int)>& function) noexcept {
  const auto set = [](const char* name, int value) {
    setenv(name, std::to_string(value).c_str(), 1);
  };
  set("RANK", rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", ranks);
  set("LOCAL_WORLD_SIZE", ranks);
  set("MASTER_PORT", port);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  set_cuda_variables();
  // Overrides torchrun's value, if there is one: torchrun's agent hosts the store of its own job.
  setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
  int code = 0;
  const auto fail = [&](const Error& error) {
    tell(report, encode(error).substr(0, kMaxReport));
    code = 1;
  };
  // Runs on a new thread. The state that OpenMP keeps for the forked thread, such as the workers
  // that libtorch computes with, belongs to the parent: using it here would wait for threads that
  // were not forked.
  try {
    std::thread([&] {
      crash::report_crashes();
      try {
        function(rank, ranks);
      } catch (...) {
        fail(without_stack(to_error(std::current_exception(), Blame::Remote)));
      }
    }).join();
  } catch (const std::system_error& error) {
    fail(system_error(Blame::Busy,
                      "spawn: starting its thread; allow this user, or the container, more threads "
                      "(ulimit -u, pids.max)",
                      error.code().value()));
  }
  std::fflush(nullptr);
  trace::timeline::finish();
  // Calls _exit() because this process must not destroy the parent's static objects.
  ::_exit(code);
}

std::string read_all(int descriptor) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const auto count = ::read(descriptor, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0 || text.size() > kMaxReport) return text;
    text.append(buffer, static_cast<std::size_t>(count));
  }
}

struct Rank {
  int rank = 0;
  Descriptor report;  // reading end
};

struct Failure {
  Error error;
  bool is_consequence = false;  // its blame suggests that another rank failed before
};

// Returns nothing if the rank ended well.
std::optional<Failure> failure_of(const Rank& child, int status) {
  if (status == 0) return std::nullopt;
  const std::string text = read_all(child.report.get());
  const std::string who = "rank " + std::to_string(child.rank);
  if (!text.empty()) {
    const Error error = decode(text);
    return Failure{error.within(who),
                   error.blame() == Blame::PeerLost || error.blame() == Blame::Cancelled};
  }
  return Failure{Error(WIFSIGNALED(status) ? Blame::PeerLost : Blame::Remote,
                       who + " ended with " + launch::describe_status(status))};
}

struct Pipe {
  Descriptor reading, writing;
};

// Processes that the function starts inherit neither end, and neither end blocks: a rank has ended
// when its report is read, even if it has forked, and it writes only as much as the pipe takes.
Pipe open_report() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw system_error(Blame::Busy, "spawn: pipe", errno);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

pid_t fork_process() {
  const pid_t process = ::fork();
  if (process >= 0) return process;
  throw system_error(
      Blame::Busy,
      "spawn: fork; allow this user, or the container, more processes (ulimit -u, pids.max)",
      errno);
}

// The parent of the ranks and child of the program that called spawn. It adopts the orphans of the
// ranks, so when the program is killed it finds the processes that the ranks have started and ends
// them as well. Runs only in this process and, until they start, in the ranks.
class Watcher {
 public:
  // `report` is the pipe to the program.
  Watcher(pid_t program, Descriptor& report) : report_(report) {
    ::prctl(PR_GET_NAME, name_.data());
    // pkill with the program's name kills the program and not this process, which cleans up after
    // it.
    ::prctl(PR_SET_NAME, "weft ranks");
    // Blocks all signals: the program's handlers would run here too, and Ctrl-C reaches the ranks
    // without this process.
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &mask_);
    ::sigaction(SIGCHLD, nullptr, &of_children_);
    std::signal(SIGCHLD, SIG_DFL);
    sigset_t end;
    ::sigemptyset(&end);
    ::sigaddset(&end, SIGTERM);
    end_ = Descriptor(::signalfd(-1, &end, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!end_) throw system_error(Blame::Busy, "spawn: signalfd", errno);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != program) ::_exit(1);
  }

  // Returns the first failure of a rank, once all have ended. Does not return in the ranks.
  std::optional<Failure> run(int ranks, int port, const std::function<void(int, int)>& function) {
    launch::Children children(launch::Reach::Descendants);
    for (int rank = 0; rank < ranks; ++rank) start(children, rank, ranks, port, function);
    auto failure = first_failure(children);
    // Processes that the ranks have started may continue if all ranks ended well.
    if (!failure) tell(report_.get(), kWell);
    if (!failure) ::_exit(0);
    return failure;
  }  // destroys `children`, which ends the other ranks and the processes that they have started

 private:
  void start(launch::Children& children, int rank, int ranks, int port,
             const std::function<void(int, int)>& function) {
    Pipe report = open_report();
    const pid_t parent = ::getpid();
    const pid_t process = fork_process();
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // ranks do not outlive this process
      if (::getppid() != parent) ::_exit(1);
      report.reading = {};
      report_ = {};
      end_ = {};
      by_process_.clear();  // closes the pipes of the other ranks
      ::prctl(PR_SET_NAME, name_.data());
      ::sigaction(SIGCHLD, &of_children_, nullptr);
      ::pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
      run_rank(rank, ranks, port, report.writing.get(), function);
    }
    children.add(process);
    by_process_[process] = {rank, std::move(report.reading)};
  }

  // Waits for the first failure, or until all ranks have ended well. A rank that lost a peer may
  // end before the peer that failed: if the peer's own error arrives soon, returns that one.
  std::optional<Failure> first_failure(launch::Children& children) const {
    constexpr auto kSoon = std::chrono::milliseconds(1000);
    std::optional<Failure> failure;
    Deadline deadline = Deadline::never();
    while (!children.running().empty() && !deadline.passed()) {
      const auto patience =
          std::min(deadline.remaining(), std::chrono::milliseconds(std::chrono::hours(1)));
      const auto ended = children.wait(patience, end_.get());
      if (ended.process == 0 && is_over()) {
        children.end_all(std::chrono::milliseconds(0));
        ::_exit(1);
      }
      if (ended.process == 0) continue;
      auto next = failure_of(by_process_.at(ended.process), ended.status);
      if (!next) continue;
      if (!failure || !next->is_consequence) failure = std::move(next);
      if (!failure->is_consequence) break;
      deadline = Deadline::sooner(deadline, Deadline::in(kSoon));
    }
    return failure;
  }

  // Whether the program has died or asks this process to end: both send SIGTERM.
  bool is_over() const {
    signalfd_siginfo about;
    return ::read(end_.get(), &about, sizeof about) == static_cast<ssize_t>(sizeof about);
  }

  Descriptor& report_;
  Descriptor end_;               // readable once this process has got SIGTERM
  std::array<char, 16> name_{};  // the program's, as are the next two
  sigset_t mask_{};
  struct sigaction of_children_ {};
  std::map<pid_t, Rank> by_process_;
};

// Must not throw: this process would continue in the program's code.
[[noreturn]] void watch_ranks(pid_t program, Descriptor report, int ranks, int port,
                              const std::function<void(int, int)>& function) noexcept {
  try {
    Watcher watcher(program, report);
    const auto failure = watcher.run(ranks, port, function);
    if (failure) tell(report.get(), encode(failure->error).substr(0, kMaxReport));
  } catch (...) {
    tell(report.get(),
         encode(to_error(std::current_exception(), Blame::Busy)).substr(0, kMaxReport));
  }
  ::_exit(1);
}

}  // namespace

void spawn(int ranks, const std::function<void(int, int)>& function) {
  constexpr int kMostRanks = 4096;  // the same limit as weft-run's
  if (ranks < 1 || ranks > kMostRanks) {
    throw Error(Blame::Caller, "spawn: " + std::to_string(ranks) + " ranks; it takes 1 to " +
                                   std::to_string(kMostRanks));
  }
  if (!function) throw Error(Blame::Caller, "spawn: the function is empty");
  struct sigaction of_children {};
  ::sigaction(SIGCHLD, nullptr, &of_children);
  if (of_children.sa_handler == SIG_IGN || (of_children.sa_flags & SA_NOCLDWAIT) != 0) {
    throw Error(Blame::Caller,
                "spawn: this process ignores SIGCHLD, so it cannot wait for its ranks; call "
                "signal(SIGCHLD, SIG_DFL) before");
  }
  const int port = launch::free_port();
  std::fflush(nullptr);  // otherwise every rank would print the buffers' content
  Pipe report = open_report();
  const pid_t program = ::getpid();
  launch::Children children;
  const pid_t process = fork_process();
  if (process == 0) {
    report.reading = {};
    watch_ranks(program, std::move(report.writing), ranks, port, function);
  }
  children.add(process);
  report.writing = {};
  int status = launch::kTakenStatus;
  while (!children.running().empty()) status = children.wait(std::chrono::hours(1)).status;
  const std::string text = read_all(report.reading.get());
  if (text == kWell) return;
  if (!text.empty()) throw decode(text);
  throw Error(
      Blame::PeerLost,
      "spawn: the process 'weft ranks', which watches the ranks and ends them when it ends, ended "
      "with " +
          launch::describe_status(status) +
          (status == launch::kTakenStatus
               ? "; do not wait for children of your own while spawn runs"
               : "; something killed it (for want of memory, the kernel's log says so)"));
}

}  // namespace weft
