// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/cuda_variables.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/signals.h>
#include <weft/engine/launch/worker_group.h>

namespace weft::launch {

using std::chrono::milliseconds;

namespace {

Error cannot_start(int local, int number) {
  return system_error(
      Blame::Busy,
      "starting local rank " + std::to_string(local) +
          ", which needs some descriptors (ulimit -n) and a process (ulimit -u, pids.max)",
      number);
}

struct Pipe {
  Descriptor reading, writing;
};

Pipe open_pipe(int local) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw cannot_start(local, errno);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

}  // namespace

WorkerGroup::WorkerGroup(const Options& options, const Rendezvous::Assignment& place)
    : options_(options), place_(place) {
  if (options_.status_seconds > 0) status_.emplace(std::chrono::seconds(options_.status_seconds));
  for (int local = 0; local < options_.ranks; ++local) start(local);
}

std::optional<WorkerGroup::Failure> WorkerGroup::supervise() {
  forward_output(milliseconds(0));
  if (status_) show(status_->due());
  if (!runs()) return std::nullopt;
  const auto ended = wait_for_end();
  if (ended.process != 0 && ended.status == 0) ended_well_.push_back(ranks_[ended.process].rank);
  // After a signal, the end of a rank is no failure: a terminal's Ctrl-C ends the ranks as well.
  if (ended.process == 0 || ended.status == 0 || received_signal != 0) return std::nullopt;
  return report(ended);
}

void WorkerGroup::end() {
  ask_for_dumps();
  end_children(grace());
  forward_output(milliseconds(0));
}

void WorkerGroup::show(const std::string& status) {
  if (!status.empty()) say(status);
}

void WorkerGroup::set_environment(int local) const {
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
  };
  const int rank = place_.first_rank + local;
  const std::string world = std::to_string(place_.world_size);
  set("LOCAL_RANK", std::to_string(local));
  set("RANK", std::to_string(rank));
  set("GROUP_RANK", std::to_string(place_.node_rank));
  set("ROLE_RANK", std::to_string(rank));
  set("ROLE_NAME", "default");
  set("LOCAL_WORLD_SIZE", std::to_string(options_.ranks));
  set("WORLD_SIZE", world);
  set("GROUP_WORLD_SIZE", std::to_string(place_.nodes));
  set("ROLE_WORLD_SIZE", world);
  set("MASTER_ADDR", place_.master_address);
  set("MASTER_PORT", std::to_string(place_.master_port));
  set("TORCHELASTIC_RESTART_COUNT", std::to_string(place_.restarts));
  set("TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.rendezvous.limits.restarts));
  set("TORCHELASTIC_RUN_ID", options_.run_id);
  set("TORCHELASTIC_USE_AGENT_STORE", "False");
  set("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT");
  ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", /*overwrite=*/0);
  ::setenv("WEFT_CRASH_TRACE", "on", /*overwrite=*/0);
  set_cuda_variables();
  // As torchrun does: several ranks on one machine must not each start a thread for every core.
  if (options_.ranks > 1) ::setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);
  // Gives each round its own folder, because weft-debug reads the dumps of one round. The ranks
  // make the folder.
  const bool may_start_again =
      options_.rendezvous.limits.restarts > 0 || !options_.endpoint_host.empty();
  const char* const dumps = ::getenv("WEFT_DUMP_DIR");
  if (may_start_again && dumps != nullptr && *dumps != '\0') {
    set("WEFT_DUMP_DIR", dumps + ("/attempt_" + std::to_string(place_.round)));
  }
}

void WorkerGroup::start(int local) {
  const bool takes_stdout = !options_.no_prefix || !log_of(local, STDOUT_FILENO).path.empty();
  Pipe out = takes_stdout ? open_pipe(local) : Pipe();
  Pipe err = open_pipe(local);
  const int rank = place_.first_rank + local;
  const std::string page = status_ ? status_->add(rank) : "";
  const pid_t parent = ::getpid();
  const pid_t process = ::fork();
  if (process < 0) throw cannot_start(local, errno);
  if (process == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::signal(SIGPIPE, SIG_DFL);  // weft-run ignores SIGPIPE; the program must not inherit that
    if (::getppid() != parent) ::_exit(1);
    if (takes_stdout) {
      ::dup2(out.writing.get(), STDOUT_FILENO);
      ::setenv("WEFT_LINE_OUTPUT", "on", /*overwrite=*/0);  // as on a terminal
    }
    ::dup2(err.writing.get(), STDERR_FILENO);
    set_environment(local);
    if (!page.empty()) ::setenv("WEFT_STATUS_FILE", page.c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& word : options_.command)
      arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    const int number = errno;
    const std::string here = "./" + options_.command.front();
    const bool is_here = number == ENOENT && here.find('/', 2) == std::string::npos &&
                         ::access(here.c_str(), F_OK) == 0;
    std::fprintf(
        stderr, "weft-run: cannot start '%s': %s%s%s\n", arguments[0], std::strerror(number),
        is_here ? " in PATH; the one in this folder is called " : "", is_here ? here.c_str() : "");
    ::_exit(127);
  }
  children_.add(process);
  if (takes_stdout) add_output(local, std::move(out.reading), STDOUT_FILENO);
  ranks_[process] = {rank, process, add_output(local, std::move(err.reading), STDERR_FILENO)};
}

Output::Log WorkerGroup::log_of(int local, int to) const {
  const bool is_instead = options_.redirected.has(local, to);
  if (!is_instead && !options_.teed.has(local, to)) return {};
  return {options_.log_folder + "/attempt_" + std::to_string(place_.round) + "/" +
              std::to_string(local) + (to == STDOUT_FILENO ? "/stdout.log" : "/stderr.log"),
          is_instead};
}

const Output* WorkerGroup::add_output(int local, Descriptor from, int to) {
  outputs_.push_back(std::make_unique<Output>(place_.first_rank + local, std::move(from), to,
                                              !options_.no_prefix, log_of(local, to)));
  return outputs_.back().get();
}

void WorkerGroup::forward_output(milliseconds patience) {
  // More rounds than full pipes need, but bounded: a rank may never stop writing.
  constexpr int kRounds = 16;
  std::vector<pollfd> watched;
  for (const auto& output : outputs_) watched.push_back({output->descriptor(), POLLIN, 0});
  for (int round = 0; round < kRounds; ++round) {
    if (::poll(watched.data(), watched.size(), static_cast<int>(patience.count())) <= 0) break;
    patience = milliseconds(0);
    bool any_open = false;
    for (std::size_t i = 0; i < watched.size(); ++i) {
      if (watched[i].revents == 0) continue;
      any_open = outputs_[i]->forward() || any_open;
      watched[i].fd = outputs_[i]->descriptor();
      note_failure(*outputs_[i]);
    }
    if (!any_open) break;
  }
}

void WorkerGroup::note_failure(const Output& output) {
  if (output.failure() == 0 || write_failure_ != 0) return;
  write_failure_ = output.failure();
  say("cannot write to " + std::string(output.where()) + ": " + std::strerror(write_failure_) +
      (write_failure_ == EPIPE ? "; nobody reads it any more, so weft-run ends the job"
                               : "; the job continues, but its ranks' output is lost"));
}

Children::Ended WorkerGroup::wait_for_end() {
  forward_output(milliseconds(20));
  if (asked_for_dumps != 0) {
    asked_for_dumps = 0;
    if (children_.signal_who_catch(SIGUSR1) == 0) {
      say("SIGUSR1 asks for dumps, but no rank writes one: none has joined a group or made an "
          "agent yet");
    }
  }
  return children_.wait(milliseconds(0));
}

Children::Ended WorkerGroup::next_failure(Deadline deadline) {
  while (!children_.running().empty() && !deadline.passed() && received_signal == 0) {
    const auto ended = wait_for_end();
    if (ended.process != 0 && ended.status != 0) return ended;
  }
  return {};
}

WorkerGroup::Failure WorkerGroup::report(Children::Ended first) {
  const Deadline deadline = Deadline::in(grace());
  std::vector<Children::Ended> failures{first};
  forward_output(milliseconds(50));
  // Gives the other ranks a moment to end by themselves and to report what they saw.
  while (!children_.running().empty() && !deadline.passed() && received_signal == 0) {
    const auto ended = next_failure(deadline);
    if (ended.process != 0) failures.push_back(ended);
  }
  const std::vector<pid_t> stopped = children_.running();
  ask_for_dumps();
  end_children(grace());
  forward_output(milliseconds(50));
  Children::Ended cause = first;
  bool is_consequence = true;
  for (const auto& failure : failures) {
    if (!ranks_[failure.process].error->tells_of_a_lost_rank()) {
      cause = failure;
      is_consequence = false;
      break;
    }
  }
  const Rank& rank = ranks_[cause.process];
  const std::string why =
      "rank " + std::to_string(rank.rank) + " failed first: " + describe_status(cause.status);
  std::fprintf(stderr, "weft-run: %s (pid %d)\n", why.c_str(), static_cast<int>(rank.process));
  if (rank.error->last_lines().empty())
    std::fprintf(stderr, "weft-run: it wrote nothing to stderr\n");
  for (const std::string& line : rank.error->last_lines())
    std::fprintf(stderr, "  %s", line.c_str());
  if (!rank.error->log_path().empty())
    std::fprintf(stderr, "weft-run: the whole of it is in %s\n", rank.error->log_path().c_str());
  if (!ended_well_.empty()) {
    std::sort(ended_well_.begin(), ended_well_.end());
    std::string ranks;
    for (const int one : ended_well_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(one);
    std::fprintf(stderr, "weft-run: before that, %s %s had ended with exit code 0\n",
                 ended_well_.size() == 1 ? "rank" : "ranks", ranks.c_str());
  }
  for (const auto& failure : failures) {
    if (failure.process == cause.process) continue;
    std::fprintf(stderr, "weft-run: then rank %d: %s\n", ranks_[failure.process].rank,
                 describe_status(failure.status).c_str());
  }
  for (const pid_t process : stopped)
    std::fprintf(stderr, "weft-run: rank %d was ended\n", ranks_[process].rank);
  return {WIFEXITED(cause.status) ? WEXITSTATUS(cause.status) : 128 + WTERMSIG(cause.status), why,
          is_consequence};
}

void WorkerGroup::ask_for_dumps() {
  if (::getenv("WEFT_DUMP_DIR") == nullptr || children_.running().empty()) return;
  children_.signal_who_catch(SIGUSR1);
  for (const Deadline deadline = Deadline::in(milliseconds(500));
       !deadline.passed() && is_hurried == 0;) {
    forward_output(milliseconds(50));
  }
}

void WorkerGroup::end_children(milliseconds patience) {
  children_.end_all(
      patience, [] { return is_hurried != 0; }, [this] { forward_output(milliseconds(0)); });
}

void WorkerGroup::end_on_signal(int number) {
  say("ended by signal " + std::to_string(number) + " (" + strsignal(number) +
      "); it ends its ranks");
  ask_for_dumps();
  if (signal_of_terminal == 0) children_.signal_all(number);
  const Deadline deadline = Deadline::in(grace());
  while (!children_.have_ended() && !deadline.passed() && is_hurried == 0) wait_for_end();
  if (is_hurried != 0 && !children_.have_ended()) say("Ctrl-C again; it kills its ranks");
  end_children(milliseconds(500));
  forward_output(milliseconds(0));
}

void WorkerGroup::clean_up() {
  forward_output(milliseconds(0));
  for (const Deadline deadline = Deadline::in(std::chrono::seconds(1));
       !deadline.passed() && is_hurried == 0;) {
    if (children_.have_ended()) break;
    forward_output(milliseconds(10));
  }
  if (const auto left = children_.reached().size(); left > 0) {
    std::fprintf(
        stderr,
        "weft-run: all ranks have ended; weft-run ends %zu processes that they left behind\n",
        left);
  }
  end_children(grace());
  forward_output(milliseconds(0));
  if (status_) show(status_->summary());
}

}  // namespace weft::launch
