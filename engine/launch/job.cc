// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/guard.h>
#include <weft/engine/launch/job.h>
#include <weft/engine/launch/output.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/rendezvous.h>
#include <weft/engine/launch/signals.h>
#include <weft/engine/launch/worker_group.h>
#include <weft/profiling/trace/merge.h>

namespace weft::launch {

namespace {

using std::chrono::milliseconds;

// The code that a shell gives a program that SIGPIPE ended.
constexpr int kBrokenPipe = 128 + SIGPIPE;
constexpr auto kPause = milliseconds(20);

bool goes_on() { return received_signal == 0; }

int exit_code_of(const Error& error) { return error.blame() == Blame::Caller ? 2 : 1; }

std::string random_id() {
  std::random_device random;
  char text[33];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", random(), random(), random(), random());
  return text;
}

// Reports the signal and returns the exit code for it. No rank may be running.
int end_on_signal() {
  say("ended by signal " + std::to_string(received_signal) + " (" + strsignal(received_signal) +
      ")");
  return 128 + received_signal;
}

// Opens the store in which the nodes meet; returns nothing if a signal arrives first. Opens it on a
// thread of its own, because a signal does not interrupt the waits for the host's name, its port
// and its answer.
std::optional<OpenedStore> open_until_signal(const Options& options, const OpenStore& open_store) {
  if (options.endpoint_host.empty()) return OpenedStore{std::make_shared<LocalStore>(), ""};
  std::packaged_task<OpenedStore()> open([options, open_store] { return open_store(options); });
  std::future<OpenedStore> opened = open.get_future();
  std::thread(std::move(open)).detach();
  const Deadline silent = Deadline::in(std::chrono::seconds(2));
  for (bool told = false; opened.wait_for(kPause) != std::future_status::ready;) {
    if (!goes_on()) return std::nullopt;
    if (told || !silent.passed()) continue;
    told = true;
    say("rendezvous: waiting for the weft-run that hosts it at " + options.endpoint_host +
        " port " + std::to_string(options.endpoint_port));
  }
  return opened.get();
}

class Job {
 public:
  Job(const Options& options, OpenedStore opened) : options_(options), opened_(std::move(opened)) {
    Rendezvous::Settings settings = options_.rendezvous;
    // Nodes that are told their rank do not meet: each is a job of one node.
    if (!meets()) settings.limits.least = settings.limits.most = 1;
    rendezvous_.emplace(opened_.store, settings,
                        Node{.id = random_id(),
                             .address = opened_.local_address,
                             .ranks = options_.ranks,
                             .wish = options_.node_rank.value_or(-1)});
  }

  int run() {
    int code = 1;
    try {
      code = run_rounds();
    } catch (const Error& error) {  // from the rendezvous or a start; no rank runs any more
      if (!goes_on()) {
        code = end_on_signal();
      } else {
        say(error.what());
        code = exit_code_of(error);
      }
    }
    rendezvous_->leave(goes_on);
    return code;
  }

 private:
  bool meets() const { return !options_.endpoint_host.empty(); }

  int run_rounds() {
    for (;;) {
      const auto place = rendezvous_->join(
          free_port(), goes_on, [](const std::string& whom) { say("rendezvous: " + whom); });
      if (!place) return goes_on() ? end_with_others() : end_on_signal();
      if (place->round > 0) announce(*place);
      if (meets() && options_.node_rank.value_or(place->node_rank) != place->node_rank) {
        say("this node has rank " + std::to_string(place->node_rank) + ", not " +
            std::to_string(*options_.node_rank) +
            " as --node-rank asks: another node asks for the same rank, or there are fewer nodes");
      }
      if (const auto code = run_round(meets() ? *place : told(*place))) return *code;
    }
  }

  // This node's place as the options give it, for nodes that do not meet.
  Rendezvous::Assignment told(Rendezvous::Assignment place) const {
    const int nodes = options_.rendezvous.limits.most;
    place.nodes = nodes;
    place.node_rank = options_.node_rank.value_or(0);
    place.first_rank = place.node_rank * options_.ranks;
    place.world_size = nodes * options_.ranks;
    place.master_address = options_.master_address;
    if (options_.master_port != 0) place.master_port = options_.master_port;
    return place;
  }

  void announce(const Rendezvous::Assignment& place) const {
    std::string text = place.cause + "; the ranks start again";
    if (options_.rendezvous.limits.restarts > 0) {
      text += ", " + std::to_string(place.restarts) + " of " +
              std::to_string(options_.rendezvous.limits.restarts) + " restarts used";
    }
    if (meets()) {
      text += ": " + std::to_string(place.world_size) + " on " + std::to_string(place.nodes) +
              (place.nodes == 1 ? " node" : " nodes");
    }
    say(text);
  }

  // Returns the job's exit code, or nothing if another round follows.
  std::optional<int> run_round(const Rendezvous::Assignment& place) {
    WorkerGroup workers(options_, place);
    try {
      return supervise(workers, place);
    } catch (const Error& error) {
      if (received_signal != 0) {
        workers.end_on_signal(received_signal);
        return 128 + received_signal;
      }
      workers.end();
      say("the ranks are ended: " + std::string(error.what()));
      return 1;
    }
  }

  std::optional<int> supervise(WorkerGroup& workers, const Rendezvous::Assignment& place) {
    while (workers.runs()) {
      const auto failure = workers.supervise();
      if (received_signal != 0) {
        workers.end_on_signal(received_signal);
        return 128 + received_signal;
      }
      if (workers.write_failure() == EPIPE) {
        workers.end();
        return kBrokenPipe;
      }
      if (failure) return after(*failure, place);
      if (const auto news = rendezvous_->look(); news != Rendezvous::News::None) {
        workers.end();
        return news == Rendezvous::News::End ? std::optional(end_with_others()) : std::nullopt;
      }
    }
    workers.clean_up();
    if (workers.write_failure() == EPIPE) return kBrokenPipe;
    rendezvous_->finished();
    return wait_for_others(workers.write_failure() == 0 ? 0 : 1);
  }

  std::optional<int> after(const WorkerGroup::Failure& failure,
                           const Rendezvous::Assignment& place) {
    // If every failure here is a lost rank of another node, waits for that node: it knows the
    // cause, or is lost itself.
    if (failure.is_consequence && place.nodes > 1 && meets()) {
      const auto patience = rendezvous_->patience() + options_.rendezvous.keep_alive_interval;
      for (const Deadline deadline = Deadline::in(patience); !deadline.passed() && goes_on();) {
        const auto news = rendezvous_->look();
        if (news == Rendezvous::News::NextRound) return std::nullopt;
        if (news == Rendezvous::News::End) return end_with_others();
        std::this_thread::sleep_for(kPause);
      }
      if (!goes_on()) return end_on_signal();
    }
    const std::string where = meets() ? " on the node at " + opened_.local_address : "";
    if (rendezvous_->failed(failure.why + where, failure.code)) return std::nullopt;
    if (options_.rendezvous.limits.restarts > 0) {
      say("no restart is left of " + std::to_string(options_.rendezvous.limits.restarts));
    }
    return failure.code;
  }

  // Returns `code` if the job ends well: it says whether this node's output could be written.
  std::optional<int> wait_for_others(int code) {
    for (;;) {
      switch (rendezvous_->look()) {
        case Rendezvous::News::NextRound: return std::nullopt;
        case Rendezvous::News::End: return rendezvous_->end()->code == 0 ? code : end_with_others();
        case Rendezvous::News::None: break;
      }
      if (!goes_on()) return end_on_signal();
      std::this_thread::sleep_for(kPause);
    }
  }

  int end_with_others() const {
    const JobEnd& end = *rendezvous_->end();
    say(end.code == 0 ? "the job has ended"
                      : "the job has failed: " + end.why + "; the weft-run there shows more");
    return end.code;
  }

  const Options& options_;
  const OpenedStore opened_;
  std::optional<Rendezvous> rendezvous_;
};

// Opens /dev/null for each of stdin, stdout and stderr that is closed. The next file or socket to
// be opened would otherwise get its number, and with it what weft-run and the ranks write.
void open_missing_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) < 0) return;
  }
}

// Merges the timeline's parts if the last rank, which normally does, was killed. Leaves the job's
// exit code as it is.
void merge_timeline() {
  const char* const file = ::getenv("WEFT_TIMELINE");
  if (file == nullptr || *file == '\0') return;
  try {
    trace::timeline::merge_if_last(file);
  } catch (const std::exception& error) {
    say(std::string("the timeline was not written: ") + error.what());
  }
}

[[noreturn]] void go_on_as_agent(char** argv) {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string agent = self.parent_path() / "weft-agent";
  ::execv(agent.c_str(), argv);
  throw system_error(Blame::Caller, "--rdzv-endpoint needs weft-agent beside weft-run: " + agent,
                     errno);
}

}  // namespace

int run_command(int argc, char** argv, const std::string& version, const OpenStore& open_store) {
  open_missing_streams();
  listen_for_signals();
  try {
    static_cast<void>(weft::config());  // reports a wrong variable once, before every rank would
    const Options options = parse_options(argc, argv, version);
    if (!options.endpoint_host.empty() && !open_store) go_on_as_agent(argv);
    rename_process(argc, argv, "weft ranks");
    auto opened = open_until_signal(options, open_store);
    // exit() would destroy objects that the waiting thread still uses.
    if (!opened) ::_exit(end_on_signal());
    const int code = Job(options, std::move(*opened)).run();
    merge_timeline();
    return code;
  } catch (const Error& error) {
    say(error.what());
    return exit_code_of(error);
  } catch (const std::exception& error) {
    say(error.what());
    return 1;
  }
}

}  // namespace weft::launch
