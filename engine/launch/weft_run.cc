// weft-run: starts the ranks of a program on this machine, as torchrun does. Sets the variables that torchrun sets,
// prefixes each line of output with its rank, and on the first failure ends the others and says first which rank failed,
// and why.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/status.h>
#include <weft/profiling/trace/merge.h>

namespace weft::launch {
namespace {

using std::chrono::milliseconds;

struct Options {
  std::string ranks = "1";
  int nodes = 1;
  int node_rank = 0;
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string run_id = "none";
  int grace_seconds = 5;
  bool no_prefix = false;
  int status_seconds = 0;
  std::vector<std::string> command;
};

// One end of a rank's output: lines are prefixed and written whole, so that ranks do not mix inside a line.
struct Output {
  int rank = 0;
  int from = -1;
  int to = STDOUT_FILENO;
  bool prefix = true;
  std::string partial;
  std::deque<std::string> last;  // of stderr: what a failure report shows

  static constexpr std::size_t kKept = 20;

  void write_line(const std::string& line) {
    const std::string text = prefix ? "[rank " + std::to_string(rank) + "] " + line : line;
    std::size_t done = 0;
    while (done < text.size()) {
      const auto count = ::write(to, text.data() + done, text.size() - done);
      if (count <= 0) return;  // our reader is gone
      done += static_cast<std::size_t>(count);
    }
    if (to != STDERR_FILENO) return;
    last.push_back(line);
    if (last.size() > kKept) last.pop_front();
  }

  void take(const char* data, std::size_t count) {
    partial.append(data, count);
    for (std::size_t end = partial.find('\n'); end != std::string::npos; end = partial.find('\n')) {
      write_line(partial.substr(0, end + 1));
      partial.erase(0, end + 1);
    }
  }

  void finish() {
    if (!partial.empty()) write_line(partial + "\n");
    partial.clear();
  }
};

struct Rank {
  int rank = 0;
  pid_t process = 0;
  Output* error = nullptr;
};

volatile std::sig_atomic_t received_signal = 0;

int count_of_ranks(const std::string& text) {
  if (text == "auto" || text == "cpu") return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (text == "gpu") {
    int count = 0;
    while (::access(("/dev/nvidia" + std::to_string(count)).c_str(), F_OK) == 0) ++count;
    if (count == 0) throw Error(Blame::Caller, "--nproc-per-node gpu: this machine has no GPU");
    return count;
  }
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 1 || value > 4096) {
    throw Error(Blame::Caller, "--nproc-per-node is '" + text + "'; it takes a number from 1 to 4096, cpu, gpu or auto");
  }
  return static_cast<int>(value);
}

class Job {
 public:
  explicit Job(Options options) : options_(std::move(options)), ranks_per_node_(count_of_ranks(options_.ranks)) {
    if (options_.node_rank >= options_.nodes) {
      throw Error(Blame::Caller, "--node-rank is " + std::to_string(options_.node_rank) + "; with --nnodes " +
                                     std::to_string(options_.nodes) + " it goes up to " +
                                     std::to_string(options_.nodes - 1));
    }
    if (options_.master_port == 0) {
      if (options_.nodes > 1)
        throw Error(Blame::Caller, "with --nnodes, all nodes need the same --master-addr and --master-port");
      options_.master_port = free_port();
    }
    if (options_.status_seconds > 0) status_.emplace(std::chrono::seconds(options_.status_seconds));
  }

  // The exit code of the job: 0, or that of the rank that failed first.
  int run() {
    for (int local = 0; local < ranks_per_node_; ++local) start(local);
    for (;;) {
      forward_output(milliseconds(0));
      if (status_) show(status_->due());
      if (received_signal != 0) return end_on_signal();
      if (children_.running().empty()) break;
      const auto ended = wait_for_end();
      if (ended.process != 0 && ended.status != 0) return report(ended);
    }
    forward_output(milliseconds(0));
    if (status_) show(status_->line());
    return 0;
  }

 private:
  static void show(const std::string& status) {
    if (!status.empty()) std::fprintf(stderr, "weft-run: %s\n", status.c_str());
  }

  void set_environment(int local) const {
    const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
    const int rank = options_.node_rank * ranks_per_node_ + local;
    const std::string world = std::to_string(options_.nodes * ranks_per_node_);
    set("LOCAL_RANK", std::to_string(local));
    set("RANK", std::to_string(rank));
    set("GROUP_RANK", std::to_string(options_.node_rank));
    set("ROLE_RANK", std::to_string(rank));
    set("ROLE_NAME", "default");
    set("LOCAL_WORLD_SIZE", std::to_string(ranks_per_node_));
    set("WORLD_SIZE", world);
    set("GROUP_WORLD_SIZE", std::to_string(options_.nodes));
    set("ROLE_WORLD_SIZE", world);
    set("MASTER_ADDR", options_.master_address);
    set("MASTER_PORT", std::to_string(options_.master_port));
    set("TORCHELASTIC_RESTART_COUNT", "0");
    set("TORCHELASTIC_MAX_RESTARTS", "0");
    set("TORCHELASTIC_RUN_ID", options_.run_id);
    set("TORCHELASTIC_USE_AGENT_STORE", "False");
    // As torchrun: several ranks on one machine must not each start a thread for every core.
    if (ranks_per_node_ > 1) ::setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);
  }

  void start(int local) {
    int out[2] = {-1, -1};
    int err[2] = {-1, -1};
    if ((!options_.no_prefix && ::pipe2(out, O_CLOEXEC) != 0) || ::pipe2(err, O_CLOEXEC) != 0) {
      throw system_error(Blame::Busy, "starting rank " + std::to_string(local), errno);
    }
    const int rank = options_.node_rank * ranks_per_node_ + local;
    const std::string page = status_ ? status_->add(rank) : "";
    const pid_t parent = ::getpid();
    const pid_t process = ::fork();
    if (process < 0) throw system_error(Blame::Busy, "starting rank " + std::to_string(local), errno);
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (::getppid() != parent) ::_exit(1);
      if (!options_.no_prefix) ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      set_environment(local);
      if (!page.empty()) ::setenv("WEFT_STATUS_FILE", page.c_str(), 1);
      std::vector<char*> arguments;
      for (const std::string& word : options_.command) arguments.push_back(const_cast<char*>(word.c_str()));
      arguments.push_back(nullptr);
      ::execvp(arguments[0], arguments.data());
      std::fprintf(stderr, "weft-run: cannot start '%s': %s\n", arguments[0], std::strerror(errno));
      ::_exit(127);
    }
    if (!options_.no_prefix) add_output(rank, out, STDOUT_FILENO);
    Output* error = add_output(rank, err, STDERR_FILENO);
    ranks_[process] = {rank, process, error};
    children_.add(process);
  }

  Output* add_output(int rank, const int (&ends)[2], int to) {
    ::close(ends[1]);
    auto output = std::make_unique<Output>();
    output->rank = rank;
    output->from = ends[0];
    output->to = to;
    output->prefix = !options_.no_prefix;
    outputs_.push_back(std::move(output));
    return outputs_.back().get();
  }

  // Moves what the ranks have written, for at most so long as nothing comes.
  void forward_output(milliseconds patience) {
    std::vector<pollfd> watched;
    for (const auto& output : outputs_) watched.push_back({output->from, POLLIN, 0});
    while (::poll(watched.data(), watched.size(), static_cast<int>(patience.count())) > 0) {
      patience = milliseconds(0);
      bool any_open = false;
      for (std::size_t i = 0; i < watched.size(); ++i) {
        if (watched[i].revents == 0) continue;
        char buffer[16384];
        const auto count = ::read(watched[i].fd, buffer, sizeof buffer);
        if (count > 0) {
          outputs_[i]->take(buffer, static_cast<std::size_t>(count));
          any_open = true;
        } else {
          outputs_[i]->finish();
          ::close(watched[i].fd);
          watched[i].fd = outputs_[i]->from = -1;
        }
      }
      if (!any_open) break;
    }
  }

  Children::Ended wait_for_end() {
    forward_output(milliseconds(20));
    return children_.wait(milliseconds(0));
  }

  // Forwards output while waiting, at most until the deadline; the next failure, or process 0.
  Children::Ended next_failure(Deadline deadline) {
    while (!children_.running().empty() && !deadline.passed() && received_signal == 0) {
      const auto ended = wait_for_end();
      if (ended.process != 0 && ended.status != 0) return ended;
    }
    return {};
  }

  // Whether a rank ended because it lost another one, as Weft's own errors say.
  bool is_consequence(const Rank& rank) const {
    for (const std::string& line : rank.error->last) {
      if (line.find("[PeerLost at ") != std::string::npos || line.find("[Cancelled at ") != std::string::npos) return true;
    }
    return false;
  }

  int report(Children::Ended first) {
    const Deadline deadline = Deadline::in(std::chrono::seconds(options_.grace_seconds));
    std::vector<Children::Ended> failures{first};
    forward_output(milliseconds(50));
    // The others get a moment to end by themselves, and to say what they saw.
    while (!children_.running().empty() && !deadline.passed() && received_signal == 0) {
      const auto ended = next_failure(deadline);
      if (ended.process != 0) failures.push_back(ended);
    }
    const std::vector<pid_t> stopped = children_.running();
    ask_for_dumps();
    children_.end_all(std::chrono::seconds(options_.grace_seconds));
    forward_output(milliseconds(50));
    Children::Ended cause = first;
    for (const auto& failure : failures) {
      if (!is_consequence(ranks_[failure.process])) {
        cause = failure;
        break;
      }
    }
    const Rank& rank = ranks_[cause.process];
    std::fprintf(stderr, "weft-run: rank %d failed first: %s (pid %d)\n", rank.rank, describe_status(cause.status).c_str(),
                 static_cast<int>(rank.process));
    if (rank.error->last.empty()) std::fprintf(stderr, "weft-run: it wrote nothing to stderr\n");
    for (const std::string& line : rank.error->last) std::fprintf(stderr, "  %s", line.c_str());
    for (const auto& failure : failures) {
      if (failure.process == cause.process) continue;
      std::fprintf(stderr, "weft-run: then rank %d: %s\n", ranks_[failure.process].rank,
                   describe_status(failure.status).c_str());
    }
    for (const pid_t process : stopped) std::fprintf(stderr, "weft-run: rank %d was ended\n", ranks_[process].rank);
    return WIFEXITED(cause.status) ? WEXITSTATUS(cause.status) : 128 + WTERMSIG(cause.status);
  }

  // What ranks that hang were doing, before they are ended: those that write no dumps at SIGUSR1 end a moment earlier.
  void ask_for_dumps() {
    if (::getenv("WEFT_DUMP_DIR") == nullptr || children_.running().empty()) return;
    children_.signal_all(SIGUSR1);
    for (const Deadline deadline = Deadline::in(milliseconds(500)); !deadline.passed();) forward_output(milliseconds(50));
  }

  int end_on_signal() {
    ask_for_dumps();
    children_.signal_all(received_signal);
    const Deadline deadline = Deadline::in(std::chrono::seconds(options_.grace_seconds));
    while (!children_.running().empty() && !deadline.passed()) wait_for_end();
    children_.end_all(milliseconds(500));
    forward_output(milliseconds(0));
    return 128 + received_signal;
  }

  Options options_;
  int ranks_per_node_;
  std::vector<std::unique_ptr<Output>> outputs_;
  std::map<pid_t, Rank> ranks_;
  Children children_;
  std::optional<StatusLine> status_;
};

// The last rank merges the timeline's parts; where that one was killed, this is who is left.
void merge_timeline() {
  const char* const file = ::getenv("WEFT_TIMELINE");
  if (file != nullptr && *file != '\0') trace::timeline::merge_if_last(file);
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Starts the ranks of a program on this machine. Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
      "MASTER_ADDR, MASTER_PORT and torchrun's other variables.",
      "weft-run");
  app.add_option("--nproc-per-node,--nproc_per_node", options.ranks, "Ranks on this machine: a number, cpu, gpu or auto")
      ->capture_default_str();
  app.add_option("--nnodes", options.nodes, "Machines of the job; start weft-run on each")
      ->capture_default_str()
      ->check(CLI::Validator(
          [](std::string& text) {
            return text.find(':') == std::string::npos
                       ? std::string()
                       : "'" + text +
                             "' is a range, and jobs whose number of machines changes are not there yet: give one number";
          },
          ""))
      ->check(CLI::PositiveNumber);
  app.add_option("--node-rank,--node_rank", options.node_rank, "Which of them this is")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--master-addr,--master_addr", options.master_address, "Address of the machine with rank 0")
      ->capture_default_str();
  app.add_option("--master-port,--master_port", options.master_port, "Port there; 0 = a free one (one machine only)")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app.add_option("--rdzv-id,--rdzv_id", options.run_id, "Name of the job, TORCHELASTIC_RUN_ID")->capture_default_str();
  app.add_option("--grace", options.grace_seconds,
                 "Seconds that ranks get to end by themselves after a failure, and again after SIGTERM")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--no-prefix,--no_prefix", options.no_prefix, "Leave the ranks' output as it is; stdout stays a terminal");
  app.add_flag("--status{5}", options.status_seconds,
               "A line to stderr every 5 seconds (--status=N: every N): each rank's steps, operations and bytes a second");
  app.footer("The program and its arguments follow the options: weft-run --nproc-per-node 2 ./train --epochs 3");
  app.prefix_command();  // from the first word that is no option, everything is the program's
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    throw Error(Blame::Caller,
                "unknown option '" + options.command.front() +
                    "': weft-run --help lists those that there are (restarts, rendezvous and elastic jobs are "
                    "not among them yet); a program whose name begins with '-' follows '--'");
  }
  if (options.command.empty()) throw Error(Blame::Caller, "no program is given; weft-run --help shows how");
  return options;
}

}  // namespace
}  // namespace weft::launch

int main(int argc, char** argv) {
  using namespace weft::launch;
  struct sigaction action {};
  action.sa_handler = [](int number) { received_signal = number; };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  try {
    const int code = Job(parse(argc, argv)).run();
    merge_timeline();
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft-run: %s\n", error.what());
    return 2;
  }
}
