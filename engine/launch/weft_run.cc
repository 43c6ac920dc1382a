// weft-run: starts the ranks of a program on this machine, as torchrun does. Sets the variables that torchrun sets,
// prefixes each line of output with its rank, and on the first failure ends the others and says first which rank failed,
// and why.
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/engine/launch/command_line.h>
#include <weft/engine/launch/output.h>
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

struct Rank {
  int rank = 0;
  pid_t process = 0;
  const Output* error = nullptr;
};

volatile std::sig_atomic_t received_signal = 0;     // that ends the job
volatile std::sig_atomic_t signal_of_terminal = 0;  // it has sent the same to the ranks, and once is enough
volatile std::sig_atomic_t asked_for_dumps = 0;

constexpr int kLongestStatus = 24 * 60 * 60;  // seconds

// Those that ranks will see.
int count_of_gpus() {
  int count = 0;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", failed)) {
    const std::string name = entry.path().filename();
    const bool is_gpu = name.size() > 6 && name.starts_with("nvidia") &&
                        std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (is_gpu) ++count;
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string list = visible;
    const auto entries = list.empty() || list == "-1" ? 0 : std::count(list.begin(), list.end(), ',') + 1;
    count = std::min(count, static_cast<int>(entries));
  }
  return count;
}

int count_of_ranks(const std::string& text) {
  const int gpus = text == "gpu" || text == "auto" ? count_of_gpus() : 0;
  if (gpus > 0) return gpus;
  if (text == "auto" || text == "cpu") return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (text == "gpu") throw Error(Blame::Caller, "--nproc-per-node gpu: this machine has no GPU, or shows none");
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

  // The exit code of the job: 0, or that of the rank that failed first; 1 when only its output could not be written.
  int run() {
    for (int local = 0; local < ranks_per_node_; ++local) start(local);
    for (;;) {
      forward_output(milliseconds(0));
      if (status_) show(status_->due());
      if (received_signal != 0) return end_on_signal();
      if (write_failure_ == EPIPE) return end_without_reader();
      if (children_.running().empty()) break;
      const auto ended = wait_for_end();
      // A terminal's Ctrl-C ends the ranks as well.
      if (ended.process != 0 && ended.status != 0 && received_signal == 0) return report(ended);
    }
    forward_output(milliseconds(0));
    end_leftovers();
    if (status_) show(status_->summary());
    return write_failure_ == EPIPE ? end_without_reader() : write_failure_ == 0 ? 0 : 1;
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
      std::signal(SIGPIPE, SIG_DFL);  // weft-run's own choice is not the program's
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
    const Output* error = add_output(rank, err, STDERR_FILENO);
    ranks_[process] = {rank, process, error};
    children_.add(process);
  }

  const Output* add_output(int rank, const int (&ends)[2], int to) {
    ::close(ends[1]);
    outputs_.push_back(std::make_unique<Output>(rank, ends[0], to, !options_.no_prefix));
    return outputs_.back().get();
  }

  // Moves what the ranks have written, for at most so long as nothing comes.
  void forward_output(milliseconds patience) {
    // More than pipes hold, and not for ever: a rank may never stop writing.
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

  void note_failure(const Output& output) {
    if (output.failure() == 0 || write_failure_ != 0) return;
    write_failure_ = output.failure();
    std::fprintf(stderr, "weft-run: cannot write to %s: %s; %s\n", output.where(), std::strerror(write_failure_),
                 write_failure_ == EPIPE ? "nobody reads it any more, and the job is ended"
                                         : "the job goes on, and what its ranks print is lost");
  }

  Children::Ended wait_for_end() {
    forward_output(milliseconds(20));
    if (asked_for_dumps != 0) {
      asked_for_dumps = 0;
      if (children_.signal_who_catch(SIGUSR1) == 0) {
        std::fprintf(stderr,
                     "weft-run: SIGUSR1 is for dumps, and no rank writes any: none has joined a group or an agent yet\n");
      }
    }
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
      if (!ranks_[failure.process].error->tells_of_a_lost_rank()) {
        cause = failure;
        break;
      }
    }
    const Rank& rank = ranks_[cause.process];
    std::fprintf(stderr, "weft-run: rank %d failed first: %s (pid %d)\n", rank.rank, describe_status(cause.status).c_str(),
                 static_cast<int>(rank.process));
    if (rank.error->last_lines().empty()) std::fprintf(stderr, "weft-run: it wrote nothing to stderr\n");
    for (const std::string& line : rank.error->last_lines()) std::fprintf(stderr, "  %s", line.c_str());
    for (const auto& failure : failures) {
      if (failure.process == cause.process) continue;
      std::fprintf(stderr, "weft-run: then rank %d: %s\n", ranks_[failure.process].rank,
                   describe_status(failure.status).c_str());
    }
    for (const pid_t process : stopped) std::fprintf(stderr, "weft-run: rank %d was ended\n", ranks_[process].rank);
    return WIFEXITED(cause.status) ? WEXITSTATUS(cause.status) : 128 + WTERMSIG(cause.status);
  }

  // What ranks that hang were doing, before they are ended.
  void ask_for_dumps() {
    if (::getenv("WEFT_DUMP_DIR") == nullptr || children_.running().empty()) return;
    children_.signal_who_catch(SIGUSR1);
    for (const Deadline deadline = Deadline::in(milliseconds(500)); !deadline.passed();) forward_output(milliseconds(50));
  }

  int end_on_signal() {
    const int number = received_signal;
    std::fprintf(stderr, "weft-run: ended by signal %d (%s), and so are its ranks\n", number, strsignal(number));
    ask_for_dumps();
    if (signal_of_terminal == 0) children_.signal_all(number);
    const Deadline deadline = Deadline::in(std::chrono::seconds(options_.grace_seconds));
    while (!children_.reached().empty() && !deadline.passed()) wait_for_end();
    children_.end_all(milliseconds(500));
    forward_output(milliseconds(0));
    return 128 + number;
  }

  // As a program of one process ends: by SIGPIPE, in a shell's terms.
  int end_without_reader() {
    children_.end_all(std::chrono::seconds(options_.grace_seconds));
    return 128 + SIGPIPE;
  }

  // What ranks have left behind. Some of it ends by itself, such as a tee that still writes.
  void end_leftovers() {
    for (const Deadline deadline = Deadline::in(std::chrono::seconds(1)); !deadline.passed();) {
      if (children_.reached().empty()) break;
      forward_output(milliseconds(10));
    }
    if (const auto left = children_.reached().size(); left > 0) {
      std::fprintf(stderr, "weft-run: all ranks have ended; %zu processes that they left behind are ended\n", left);
    }
    children_.end_all(std::chrono::seconds(options_.grace_seconds));
    forward_output(milliseconds(0));
  }

  Options options_;
  int ranks_per_node_;
  std::vector<std::unique_ptr<Output>> outputs_;
  std::map<pid_t, Rank> ranks_;
  Children children_{Reach::Descendants};
  std::optional<StatusLine> status_;
  int write_failure_ = 0;  // errno of the first
};

// The last rank merges the timeline's parts; where that one was killed, this is who is left. The job's exit code stays.
void merge_timeline() {
  const char* const file = ::getenv("WEFT_TIMELINE");
  if (file == nullptr || *file == '\0') return;
  try {
    trace::timeline::merge_if_last(file);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft-run: the timeline was not written: %s\n", error.what());
  }
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
      ->check(whole_number(1));
  app.add_option("--node-rank,--node_rank", options.node_rank, "Which of them this is")
      ->capture_default_str()
      ->check(whole_number(0));
  app.add_option("--master-addr,--master_addr", options.master_address, "Address of the machine with rank 0")
      ->capture_default_str();
  app.add_option("--master-port,--master_port", options.master_port, "Port there; 0 = a free one (one machine only)")
      ->capture_default_str()
      ->check(whole_number(0, 65535));
  app.add_option("--rdzv-id,--rdzv_id", options.run_id, "Name of the job, TORCHELASTIC_RUN_ID")->capture_default_str();
  app.add_option("--grace", options.grace_seconds,
                 "Seconds that ranks get to end by themselves after a failure, and again after SIGTERM")
      ->capture_default_str()
      ->check(whole_number(0));
  app.add_flag("--no-prefix,--no_prefix", options.no_prefix, "Leave the ranks' output as it is; stdout stays a terminal");
  std::string status;
  app.add_flag("--status{5}", status,
               "A line to stderr every 5 seconds (--status=N: every N): each rank's steps, operations and bytes a second")
      ->check(whole_number(1, kLongestStatus));
  app.footer("The program and its arguments follow the options: weft-run --nproc-per-node 2 ./train --epochs 3");
  app.prefix_command();  // from the first word that is no option, everything is the program's
  weft::launch::parse(app, argc, argv);
  options.command = app.remaining();
  const auto is_status_without_number = [](const char* word) { return std::string(word) == "--status="; };
  if (std::any_of(argv + 1, argv + argc - options.command.size(), is_status_without_number)) {
    throw Error(Blame::Caller, "--status= has no number behind it: --status is every 5 seconds, --status=N every N");
  }
  if (!status.empty()) options.status_seconds = std::stoi(status);
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
  std::signal(SIGCHLD, SIG_DFL);  // ignored, as some parents leave it, nobody could wait for a child
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int number, siginfo_t* from, void*) {
    signal_of_terminal = from->si_code == SI_KERNEL;
    received_signal = number;
  };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  for (const int number : {SIGHUP, SIGQUIT}) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);  // nohup stays what it is
  }
  action.sa_handler = [](int) { asked_for_dumps = 1; };
  action.sa_flags = SA_RESTART;  // a line that is being written goes on
  sigaction(SIGUSR1, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  try {
    static_cast<void>(weft::config());  // a wrong variable is reported once here, not by every rank
    const int code = Job(parse(argc, argv)).run();
    merge_timeline();
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft-run: %s\n", error.what());
    return 2;
  }
}
