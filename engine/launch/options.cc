// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>

#include <weft/base/error.h>
#include <weft/engine/launch/command_line.h>
#include <weft/engine/launch/options.h>
#include <weft/engine/launch/process.h>

namespace weft::launch {

namespace {

using std::chrono::milliseconds;

constexpr int kLongestStatus = 24 * 60 * 60;  // seconds
constexpr int kMostNodes = 65536;
constexpr int kDefaultEndpointPort = 29400;  // torchrun's

// Parses `text` as a number from `least` to `most`. If it returns false, `value` is unspecified.
template <class T>
bool reads(const std::string& text, T least, T most, T& value) {
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  return failure == std::errc() && end == text.data() + text.size() && value >= least &&
         value <= most;
}

// Counts the GPUs that ranks will see.
int count_of_gpus() {
  int count = 0;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", failed)) {
    const std::string name = entry.path().filename();
    const bool is_gpu = name.size() > 6 && name.starts_with("nvidia") &&
                        std::all_of(name.begin() + 6, name.end(),
                                    [](unsigned char c) { return std::isdigit(c) != 0; });
    if (is_gpu) ++count;
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string list = visible;
    const auto entries =
        list.empty() || list == "-1" ? 0 : std::count(list.begin(), list.end(), ',') + 1;
    count = std::min(count, static_cast<int>(entries));
  }
  return count;
}

int count_of_ranks(const std::string& text) {
  const int gpus = text == "gpu" || text == "auto" ? count_of_gpus() : 0;
  if (gpus > 0) return gpus;
  if (text == "auto" || text == "cpu")
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (text == "gpu")
    throw Error(Blame::Caller, "--nproc-per-node gpu: no GPU is visible on this machine");
  int value = 0;
  if (reads(text, 1, 4096, value)) return value;
  throw Error(Blame::Caller, "--nproc-per-node is '" + text +
                                 "'; it takes a number from 1 to 4096, cpu, gpu or auto");
}

// Reads "4" or "1:4".
void read_nodes(const std::string& text, RendezvousLimits& limits) {
  const auto colon = text.find(':');
  const std::string least = text.substr(0, colon);
  const std::string most = colon == std::string::npos ? least : text.substr(colon + 1);
  if (reads(least, 1, kMostNodes, limits.least) &&
      reads(most, limits.least, kMostNodes, limits.most))
    return;
  throw Error(Blame::Caller,
              "--nnodes is '" + text +
                  "'; it takes a whole number of at least 1, or a minimum and a maximum as in 1:4");
}

// Reads "host", "host:29400" or "[::1]:29400". Port 0 is for a job of one machine, which needs no
// port.
void read_endpoint(const std::string& text, Options& options) {
  std::string host = text, port;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    host = close == std::string::npos ? "" : text.substr(1, close - 1);
    if (close != std::string::npos) port = text.substr(close + 1);
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':'));
  }
  options.endpoint_host = host;
  options.endpoint_port = kDefaultEndpointPort;
  const bool has_port = port.empty() || (port.starts_with(':') &&
                                         reads(port.substr(1), 0, 65535, options.endpoint_port));
  if (!host.empty() && has_port) return;
  throw Error(Blame::Caller, "--rdzv-endpoint is '" + text +
                                 "'; it takes host:port or [IPv6]:port of a machine of the job");
}

// "join_timeout=600,last_call_timeout=30": torchrun's names.
void read_settings(const std::string& text, Options& options) {
  Rendezvous::Settings& settings = options.rendezvous;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const auto equals = item.find('=');
    const std::string name = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    constexpr double kLongest = 10 * 365 * 86400.0;
    double number = 0;
    const auto as_time = [&] { return milliseconds(static_cast<std::int64_t>(number * 1000)); };
    const bool is_number =
        reads(value, name == "last_call_timeout" ? 0.0 : 0.001, kLongest, number);
    if (name == "join_timeout" && is_number) {
      settings.join_timeout = as_time();
    } else if (name == "last_call_timeout" && is_number) {
      settings.last_call_timeout = as_time();
    } else if (name == "keep_alive_interval" && is_number) {
      settings.keep_alive_interval = as_time();
    } else if (name == "keep_alive_max_attempt" &&
               reads(value, 1, 1000, settings.keep_alive_max_attempt)) {
      continue;
    } else if (name == "is_host" && (value == "0" || value == "1")) {
      options.is_host = value == "1";
    } else {
      throw Error(Blame::Caller, "--rdzv-conf has '" + item +
                                     "'; it takes NAME=NUMBER,… with the names join_timeout (600), "
                                     "last_call_timeout (30) and keep_alive_interval (5), in "
                                     "seconds, keep_alive_max_attempt (3) and is_host (0, 1)");
    }
  }
}

// Returns a new folder for each run; it is inside `folder` for every name of a run.
std::string log_folder_in(const std::string& folder, std::string run_id) {
  std::replace(run_id.begin(), run_id.end(), '/', '_');
  std::random_device random;
  char suffix[16];
  std::snprintf(suffix, sizeof suffix, "_%08x", random());
  return folder + "/" + run_id + suffix;
}

// Checks the combination of options.
void check(Options& options, bool is_standalone, bool names_master) {
  const RendezvousLimits& limits = options.rendezvous.limits;
  if (!options.endpoint_host.empty() && options.endpoint_port == 0) {
    if (limits.most > 1) {
      throw Error(Blame::Caller,
                  "--rdzv-endpoint has port 0, which chooses a free port that the other nodes "
                  "could not know; give a port");
    }
    options.endpoint_host.clear();
  }
  const bool meets = !options.endpoint_host.empty();
  if (is_standalone && (meets || limits.most > 1)) {
    throw Error(Blame::Caller,
                "--standalone is for one machine; leave out --rdzv-endpoint, and --nnodes above 1");
  }
  if (meets && names_master) {
    throw Error(Blame::Caller,
                "with --rdzv-endpoint the nodes agree on the master; leave out --master-addr and "
                "--master-port");
  }
  if (options.node_rank.value_or(0) >= limits.most) {
    throw Error(Blame::Caller, "--node-rank is " + std::to_string(*options.node_rank) +
                                   "; with --nnodes " + std::to_string(limits.most) +
                                   " it goes up to " + std::to_string(limits.most - 1));
  }
  if (meets || limits.most == 1) return;
  const std::string fix = "; give all nodes the same --rdzv-endpoint host:port";
  if (limits.least != limits.most) {
    throw Error(Blame::Caller, "--nnodes " + std::to_string(limits.least) + ":" +
                                   std::to_string(limits.most) +
                                   ": a variable number of nodes needs a rendezvous" + fix);
  }
  if (limits.restarts > 0) {
    throw Error(Blame::Caller, "--max-restarts on several machines needs a rendezvous" + fix);
  }
  if (options.master_port == 0) {
    throw Error(
        Blame::Caller,
        "with --nnodes, all nodes need the same --master-addr and --master-port, or the same "
        "--rdzv-endpoint");
  }
}

// Adds to the usage line that a program follows, which CLI11 does not know.
struct Help final : CLI::Formatter {
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, std::move(name));
    usage.erase(usage.find_last_not_of('\n') + 1);
    return usage + " PROGRAM [ARGUMENTS]\n";
  }
};

}  // namespace

Streams Streams::parse(const std::string& option, const std::string& text, int ranks) {
  Streams streams;
  int number = 0;
  if (reads(text, 0, 3, number)) {
    streams.of_all_ = number;
    return streams;
  }
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const auto colon = item.find(':');
    int rank = 0;
    if (colon == std::string::npos || !reads(item.substr(0, colon), 0, 4095, rank) ||
        !reads(item.substr(colon + 1), 0, 3, number)) {
      throw Error(Blame::Caller, option + " is '" + text +
                                     "'; it takes 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or "
                                     "one of these for single local ranks as in 0:3,1:2");
    }
    if (rank >= ranks) {
      throw Error(Blame::Caller, option + " names local rank " + std::to_string(rank) +
                                     "; with --nproc-per-node " + std::to_string(ranks) +
                                     " they go up to " + std::to_string(ranks - 1));
    }
    streams.of_rank_[rank] = number;
  }
  return streams;
}

bool Streams::has(int local_rank, int descriptor) const {
  const auto known = of_rank_.find(local_rank);
  const int streams = known == of_rank_.end() ? of_all_ : known->second;
  return (streams & descriptor) != 0;  // 1 is stdout, 2 stderr
}

Options parse_options(int argc, char** argv, const std::string& version) {
  Options options;
  Rendezvous::Settings& rendezvous = options.rendezvous;
  std::string ranks = "1", nodes = "1", endpoint, settings, backend = "c10d";
  std::string log_folder, redirects = "0", tee = "0";
  bool is_standalone = false;
  double monitor_seconds = 0.1;
  CLI::App app(
      "Starts the ranks of a program on this machine. Each gets RANK, LOCAL_RANK, WORLD_SIZE, "
      "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and torchrun's other variables; if a machine has "
      "several ranks, each gets OMP_NUM_THREADS=1 unless that is set.",
      "weft-run");
  app.set_version_flag("--version", version);
  app.add_option("--nproc-per-node,--nproc_per_node", ranks,
                 "Ranks on this machine: a number, cpu, gpu or auto")
      ->capture_default_str();
  app.add_option(
         "--nnodes", nodes,
         "Number of machines, or a minimum and a maximum as in 1:4; start weft-run on each machine")
      ->capture_default_str();
  app.add_option("--max-restarts,--max_restarts", rendezvous.limits.restarts,
                 "How often all ranks start again after a failure, before the job fails. "
                 "WEFT_DUMP_DIR then has a folder attempt_N for each start")
      ->capture_default_str()
      ->check(whole_number(0));
  app.add_option("--rdzv-endpoint,--rdzv_endpoint", endpoint,
                 "Where the nodes meet: host:port of one of them; its weft-run must live as long "
                 "as the job (default port: 29400)");
  app.add_option("--rdzv-id,--rdzv_id", options.run_id,
                 "Name of the job at the rendezvous; also TORCHELASTIC_RUN_ID")
      ->capture_default_str();
  app.add_option(
      "--rdzv-conf,--rdzv_conf", settings,
      "NAME=NUMBER,…: join_timeout (600), last_call_timeout (30), keep_alive_interval (5), in "
      "seconds; keep_alive_max_attempt (3); is_host (default: 1 if the endpoint is this machine)");
  app.add_option("--rdzv-backend,--rdzv_backend", backend,
                 "c10d, or static without --rdzv-endpoint")
      ->capture_default_str();
  app.add_flag("--standalone", is_standalone,
               "Run a job on one machine, as weft-run does without --nnodes");
  app.add_option("--monitor-interval,--monitor_interval", monitor_seconds,
                 "Seconds between checks of the other nodes")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 3600.0));
  app.add_option("--local-addr,--local_addr", options.local_address,
                 "Address by which the other nodes reach this one (default: that of the route to "
                 "the endpoint)");
  app.add_option("--node-rank,--node_rank", options.node_rank,
                 "Rank of this machine, from 0; with --rdzv-endpoint only a wish")
      ->check(whole_number(0));
  auto* const master_address = app.add_option("--master-addr,--master_addr", options.master_address,
                                              "Address of the machine with rank 0")
                                   ->capture_default_str();
  auto* const master_port =
      app.add_option("--master-port,--master_port", options.master_port,
                     "Port on that machine; 0 = a free port (one machine only)")
          ->capture_default_str()
          ->check(whole_number(0, 65535));
  app.add_option(
         "--grace", options.grace_seconds,
         "Seconds that ranks get to end by themselves after a failure, and again after SIGTERM")
      ->capture_default_str()
      ->check(whole_number(0));
  app.add_flag("--no-prefix,--no_prefix", options.no_prefix,
               "Leave the ranks' output as it is; stdout stays a terminal");
  app.add_option("--log-dir,--log_dir", log_folder,
                 "Folder for the ranks' output: RDZV-ID_…/attempt_N/LOCAL_RANK/stdout.log and "
                 "stderr.log; implies --tee 3 if neither --redirects nor --tee is given");
  app.add_option("-r,--redirects", redirects,
                 "Write to the logs only: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by local rank");
  app.add_option("-t,--tee", tee, "Write to the logs as well; takes the same values");
  std::string status;
  app.add_flag("--status{5}", status,
               "Print a line to stderr every 5 seconds (--status=N: every N seconds): each rank's "
               "steps, operations and bytes a second, and the share of the time in which it waited "
               "for others; the others wait for the rank that waits least")
      ->check(whole_number(1, kLongestStatus));
  app.formatter(std::make_shared<Help>());
  app.footer(
      "The program and its arguments follow the options: weft-run --nproc-per-node 2 ./train "
      "--epochs 3");
  app.prefix_command();  // everything after the options belongs to the program
  weft::launch::parse(app, argc, argv);
  options.command = app.remaining();
  const auto is_status_without_number = [](const char* word) {
    return std::string(word) == "--status=";
  };
  if (std::any_of(argv + 1, argv + argc - options.command.size(), is_status_without_number)) {
    throw Error(
        Blame::Caller,
        "--status= has no number; use --status (every 5 seconds) or --status=N (every N seconds)");
  }
  if (!status.empty()) options.status_seconds = std::stoi(status);
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    throw Error(Blame::Caller, "unknown option '" + options.command.front() +
                                   "'; weft-run --help lists all options; put '--' before a "
                                   "program whose name begins with '-'");
  }
  options.ranks = count_of_ranks(ranks);
  read_nodes(nodes, rendezvous.limits);
  if (!endpoint.empty()) read_endpoint(endpoint, options);
  read_settings(settings, options);
  rendezvous.monitor_interval = milliseconds(static_cast<std::int64_t>(monitor_seconds * 1000));
  if (backend == "static" && !endpoint.empty()) {
    throw Error(Blame::Caller,
                "--rdzv-backend static goes with --node-rank, --master-addr and --master-port; "
                "--rdzv-endpoint needs c10d");
  }
  if (backend != "c10d" && backend != "static") {
    throw Error(Blame::Caller,
                "unknown --rdzv-backend " + backend +
                    "; use c10d, or give --node-rank, --master-addr and --master-port");
  }
  check(options, is_standalone, master_address->count() > 0 || master_port->count() > 0);
  options.redirected = Streams::parse("--redirects", redirects, options.ranks);
  options.teed = Streams::parse("--tee", tee, options.ranks);
  const bool names_streams = options.redirected.any() || options.teed.any();
  if (names_streams && log_folder.empty()) {
    throw Error(Blame::Caller, "--redirects and --tee need a folder for the logs: --log-dir");
  }
  if (!log_folder.empty()) {
    if (!names_streams) options.teed = Streams::parse("--tee", "3", options.ranks);
    options.log_folder = log_folder_in(log_folder, options.run_id);
  }
  if (options.command.empty())
    throw Error(Blame::Caller, "no program is given; weft-run --help shows how");
  return options;
}

}  // namespace weft::launch
