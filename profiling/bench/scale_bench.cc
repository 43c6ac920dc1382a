// SPDX-License-Identifier: Apache-2.0
// Measures what grows with the number of ranks: joining and the first all_reduce, against Gloo
// (through c10d) and Open MPI; split(); how soon all ranks know a death; memory and descriptors of
// a rank. Then models 1,000, 10,000 and 100,000 ranks from measured costs of this machine and
// stated figures of a network (scale_model.h has the formulas and their sources).
//
// The ranks are processes that are forked from this one, which has loaded libtorch. They begin at
// one moment. Times are those of the slowest rank: from the beginning until it has joined, and
// until its first all_reduce (4 bytes) has ended. A rank's first split also copies pages that it
// has from this process, as every first use in a forked process does. Open MPI's ranks are started
// by mpirun, and begin with MPI_Init. All share this machine's cores.
//
// --latency-us, --gbit and --ranks-per-host change the network's figures.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <weft/base/event_loop.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/scale_model.h>
#include <weft/profiling/bench/workers.h>
#include <weft/transport/registry.h>
#include <weft/weft.h>

namespace {

using weft::bench::now;
using Numbers = std::vector<double>;

// Ranks that run `body` and report numbers.
class Ranks {
 public:
  // `body` first calls begin(), which returns once all ranks have called it.
  using Body = std::function<void(int rank, const std::function<void()>& begin,
                                  const std::function<void(const Numbers&)>& report)>;
  Ranks(int ranks, const Body& body) {
    const std::string port = std::to_string(weft::launch::free_port());
    int ready[2], go[2], said[2];
    if (pipe(ready) != 0 || pipe(go) != 0 || pipe(said) != 0) fail("pipe");
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t process = fork();
      if (process < 0) fail("fork");
      if (process > 0) {
        processes_.push_back(process);
        continue;
      }
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(go[1]);
      for (const auto& [name, value] :
           std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                              {"LOCAL_RANK", std::to_string(rank)},
                                              {"WORLD_SIZE", std::to_string(ranks)},
                                              {"MASTER_ADDR", "127.0.0.1"},
                                              {"MASTER_PORT", port}})
        setenv(name.c_str(), value.c_str(), 1);
      run(rank, body, ready[1], go[0], said[1]);
    }
    for (const int end : {ready[1], go[0], said[1]}) close(end);
    said_ = fdopen(said[0], "r");
    char byte = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (read(ready[0], &byte, 1) != 1) fail("a rank ended before it began");
    }
    began_ = now();
    close(go[1]);
    close(ready[0]);
  }
  ~Ranks() {
    for (const pid_t process : processes_) waitpid(process, nullptr, 0);
    fclose(said_);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  double began() const { return began_; }
  void kill(int rank) const { ::kill(processes_.at(static_cast<std::size_t>(rank)), SIGKILL); }
  // One report of each of so many ranks.
  std::vector<Numbers> reports(int count) {
    std::vector<Numbers> all;
    char line[1024];
    while (static_cast<int>(all.size()) < count) {
      if (fgets(line, sizeof line, said_) == nullptr) fail("a rank ended without a report");
      std::istringstream text(line);
      Numbers& numbers = all.emplace_back();
      for (double number = 0; text >> number;) numbers.push_back(number);
    }
    return all;
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    std::fprintf(stderr, "scale_bench: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(2);
  }
  [[noreturn]] static void run(int rank, const Body& body, int ready, int go, int said) {
    at::set_num_threads(1);
    const auto begin = [=] {
      char byte = 0;
      if (write(ready, &byte, 1) != 1) _exit(2);
      close(ready);
      static_cast<void>(read(go, &byte, 1));
    };
    const auto report = [=](const Numbers& numbers) {
      std::string line;
      for (const double number : numbers) line += std::to_string(number * 1e9) + " ";
      line += "\n";
      if (write(said, line.data(), line.size()) < 0) _exit(2);
    };
    try {
      body(rank, begin, report);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "scale_bench: rank %d: %s\n", rank, error.what());
      _exit(2);
    }
    _exit(0);
  }

  std::vector<pid_t> processes_;
  FILE* said_ = nullptr;
  double began_ = 0;
};

double greatest(const std::vector<Numbers>& reports, std::size_t column) {
  double most = 0;
  for (const Numbers& numbers : reports) most = std::max(most, numbers.at(column) / 1e9);
  return most;
}

double median(const std::vector<Numbers>& reports, std::size_t column) {
  std::vector<double> values;
  for (const Numbers& numbers : reports) values.push_back(numbers.at(column) / 1e9);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Bytes of this process, pages that processes share counted once in all of them.
double proportional_memory() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return std::atof(line.c_str() + 4) * 1024;
  }
  return 0;
}

double descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<double>(std::distance(begin(all), end(all)) - 1);
}

double processor_time() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// A rank of Weft reports these figures after its first all_reduce.
enum Column : std::size_t {
  kJoined,
  kReduced,
  kProcessor,
  kMemory,
  kDescriptors,
  kFirstSplit,
  kLaterSplits  // kSplits - 1 of them
};
constexpr std::size_t kSplits = 5;

Ranks::Body weft_rank(const std::string& backend) {
  return [backend](int rank, const auto& begin, const auto& report) {
    begin();
    const double memory = proportional_memory(), processor = processor_time();
    auto group = weft::init_process_group({.backend = backend});
    const double joined = now();
    const double used = processor_time() - processor;
    auto one = at::ones({1});
    group.all_reduce(one).wait();
    const double reduced = now();
    group.barrier().wait();
    Numbers numbers{joined, reduced, used};
    std::vector<weft::ProcessGroup> halves;
    std::vector<double> splits;
    while (splits.size() < kSplits) {
      const double start = now();
      halves.push_back(group.split(rank % 2, rank));
      splits.push_back(now() - start);
      if (splits.size() == 1) {
        numbers.push_back(proportional_memory() - memory);
        numbers.push_back(descriptors());
      }
      group.barrier().wait();
    }
    numbers.insert(numbers.end(), splits.begin(), splits.end());
    report(numbers);
    group.barrier().wait();
  };
}

// ProcessGroupGloo in a TCPStore, without Weft's membership.
Ranks::Body gloo_rank(int ranks) {
  return [ranks](int rank, const auto& begin, const auto& report) {
    const auto transport = weft::transport::open("gloo");
    begin();
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
    options.isServer = rank == 0;
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const auto communicator =
        transport->join({.rank = rank,
                         .size = ranks,
                         .group_name = "bench",
                         .store = std::make_shared<weft::group::StoreBootstrap>(store),
                         .timeout = std::chrono::minutes(5),
                         .loop = std::make_shared<weft::EventLoop>("bench"),
                         .interface_address = "127.0.0.1"});
    const double joined = now();
    float value = 1;
    const auto reduce = [&] {
      const auto op = communicator->all_reduce(
          {weft::Slice{reinterpret_cast<std::byte*>(&value), sizeof value, {}},
           weft::Dtype::Float32},
          weft::ReduceOp::Sum, {}, {});
      if (!op.done().synchronize(weft::Deadline::in(std::chrono::minutes(5))) || op.error())
        std::_Exit(3);
    };
    reduce();
    report({joined, now()});
    reduce();
  };
}

struct Peer {
  std::string name;
  std::function<std::pair<double, double>()> run;  // seconds until all have joined, have reduced
  weft::bench::Samples joined = {}, reduced = {};
};

std::pair<double, double> run_ranks(int ranks, const Ranks::Body& body) {
  Ranks running(ranks, body);
  const auto reports = running.reports(ranks);
  return {greatest(reports, kJoined) - running.began(),
          greatest(reports, kReduced) - running.began()};
}

std::pair<double, double> run_mpi(int ranks, const std::string& program) {
  const std::string command = "mpirun --allow-run-as-root --oversubscribe --bind-to none -n " +
                              std::to_string(ranks) + " --mca btl vader,self '" + program +
                              "' 2>/dev/null";
  FILE* const output = popen(command.c_str(), "r");
  std::pair<double, double> times{0, 0};
  const bool is_whole =
      output != nullptr && fscanf(output, "%lf %lf", &times.first, &times.second) == 2;
  if (output == nullptr || pclose(output) != 0 || !is_whole) return {0, 0};
  return times;
}

void measure_joining(weft::bench::Report& report, int ranks, const std::string& mpi) {
  const std::string name = std::to_string(ranks) + " ranks";
  if (!report.wants("joining " + name)) return;
  std::vector<Peer> peers;
  peers.push_back({"weft", [=] { return run_ranks(ranks, weft_rank("weft")); }});
  peers.push_back({"weft tcp", [=] { return run_ranks(ranks, weft_rank("tcp")); }});
  peers.push_back({"gloo (c10d)", [=] { return run_ranks(ranks, gloo_rank(ranks)); }});
  if (!mpi.empty()) peers.push_back({"Open MPI", [=] { return run_mpi(ranks, mpi); }});
  for (int round = 0; round < report.runs(); ++round) {
    for (Peer& peer : peers) {
      const auto [joined, reduced] = peer.run();
      if (joined == 0) continue;
      peer.joined.add(joined);
      peer.reduced.add(reduced);
    }
  }
  for (const auto& [what, samples] :
       {std::pair{"joining ", &Peer::joined}, std::pair{"first all_reduce ", &Peer::reduced}}) {
    for (const Peer& peer : peers) {
      if ((peer.*samples).count() == 0) {
        report.note(peer.name + " gave no time for " + name);
      } else {
        report.add(weft::bench::time_row(what + name, peer.name, 4, peer.*samples, 1e3, "ms"));
      }
    }
  }
}

void add_quantity(weft::bench::Report& report, const std::string& name, const std::string& peer,
                  const std::string& metric, const std::string& unit, double value) {
  report.add({.name = name,
              .peer = peer,
              .metric = metric,
              .unit = unit,
              .p50 = value,
              .p99 = value,
              .runs = 1});
}

void measure_group(weft::bench::Report& report, int ranks, const std::string& backend) {
  const std::string name = std::to_string(ranks) + " ranks";
  if (!report.wants("split " + name)) return;
  weft::bench::Samples first, later;
  std::vector<Numbers> reports;
  for (int round = 0; round < report.runs(); ++round) {
    Ranks running(ranks, weft_rank(backend));
    reports = running.reports(ranks);
    first.add(greatest(reports, kFirstSplit));
    for (std::size_t i = 0; i + 1 < kSplits; ++i) later.add(greatest(reports, kLaterSplits + i));
  }
  const std::string peer = backend == "weft" ? "weft" : "weft " + backend;
  report.add(weft::bench::time_row("first split " + name, peer, 0, first, 1e3, "ms"));
  report.add(weft::bench::time_row("split " + name, peer, 0, later, 1e3, "ms"));
  add_quantity(report, "memory " + name, peer, "memory of a rank", "MiB",
               median(reports, kMemory) / (1 << 20));
  add_quantity(report, "descriptors " + name, peer, "descriptors of a rank", "",
               median(reports, kDescriptors));
  add_quantity(report, "processor " + name, peer, "processor time of joining", "ms",
               median(reports, kProcessor) * 1e3);
}

// Seconds until all others know that the rank was killed.
double tell_death(int ranks, int victim) {
  Ranks running(ranks, [victim](int rank, const auto& begin, const auto& report) {
    begin();
    auto group = weft::init_process_group({.backend = "tcp"});
    group.barrier().wait();
    report({0});
    while (rank == victim) pause();
    try {
      group.barrier().wait();
    } catch (const weft::Error&) {
      report({now()});
    }
  });
  static_cast<void>(running.reports(ranks));
  const double killed = now();
  running.kill(victim);
  return greatest(running.reports(ranks - 1), 0) - killed;
}

void measure_deaths(weft::bench::Report& report, int ranks) {
  const std::string name = "death " + std::to_string(ranks) + " ranks";
  if (!report.wants(name)) return;
  for (const auto& [which, victim] :
       {std::pair{"of the root", 0}, std::pair{"of a leaf", ranks - 1}}) {
    weft::bench::Samples times;
    for (int round = 0; round < report.runs(); ++round) times.add(tell_death(ranks, victim));
    report.add(weft::bench::time_row(name, std::string("weft, ") + which, 0, times, 1e3, "ms"));
  }
}

// --- Costs for the model ---

// Two ranks; returns rank 0's median time of an operation in seconds.
double time_of_two(const std::string& backend, int calls,
                   const std::function<void(weft::ProcessGroup& group)>& operation) {
  Ranks running(2, [&](int rank, const auto& begin, const auto& report) {
    begin();
    weft::bench::pin_to_core(rank);
    auto group = weft::init_process_group({.backend = backend});
    group.barrier().wait();
    for (int i = 0; i < calls / 5 + 1; ++i) operation(group);
    auto times = weft::bench::time_each(calls, [&] { operation(group); });
    std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
    report({static_cast<double>(rank), times[static_cast<std::size_t>(calls / 2)]});
    group.barrier().wait();
  });
  for (const Numbers& numbers : running.reports(2)) {
    if (numbers[0] == 0) return numbers[1] / 1e9;
  }
  return 0;
}

double time_of_message(const std::string& backend) {
  return time_of_two(backend, 2000,
                     [one = at::ones({1})](weft::ProcessGroup& group) {
                       const int other = 1 - group.rank();
                       if (group.rank() == 0) group.send(one, other).wait();
                       group.recv(one, other).wait();
                       if (group.rank() == 1) group.send(one, other).wait();
                     }) /
         2;
}

// Returns the time that the store's host spends on a request, while other processes ask it as fast
// as they can.
double time_of_request() {
  constexpr int kClients = 4, kRequests = 5000;
  Ranks running(kClients + 1, [](int rank, const auto& begin, const auto& report) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
    options.isServer = rank == 0;
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    begin();
    if (rank == 0) {
      report({0});
      store->wait({"over"});
      return;
    }
    for (int i = 0; i < kRequests; ++i) static_cast<void>(store->check({"key"}));
    report({now()});
    if (store->add("ended", 1) == kClients) store->set("over", std::vector<std::uint8_t>{1});
  });
  return (greatest(running.reports(kClients + 1), 0) - running.began()) / (kClients * kRequests);
}

// Half the time to make a connection of this machine with itself, and to close it.
double time_of_connection() {
  constexpr int kConnections = 2000;
  const weft::Descriptor listening = weft::group::open_listener(AF_INET, 0);
  const int port = weft::group::port_of(listening.get());
  const double start = now();
  for (int i = 0; i < kConnections; ++i) {
    const weft::Descriptor one(
        weft::group::connect_to("127.0.0.1", port, weft::Deadline::in(std::chrono::seconds(10))));
    const weft::Descriptor other(accept(listening.get(), nullptr, nullptr));
  }
  return (now() - start) / kConnections / 2;
}

void model(weft::bench::Report& report, const weft::bench::Network& network) {
  if (!report.wants("model")) return;
  weft::bench::Costs costs;
  costs.tcp_message = time_of_message("tcp");
  costs.shm_message = time_of_message("shm");
  costs.store_request = time_of_request();
  costs.connection = time_of_connection();
  costs.all_reduce_host =
      time_of_two("shm", 10, [all = std::make_shared<at::Tensor>()](weft::ProcessGroup& group) {
        if (!all->defined()) *all = at::ones({weft::bench::kLargeBytes / sizeof(float)});
        group.all_reduce(*all).wait();
      });
  {
    constexpr int kRanks = 16;
    Ranks running(kRanks, weft_rank("weft"));
    costs.joining = median(running.reports(kRanks), kProcessor);
  }
  const auto cost = [&](const std::string& what, double seconds) {
    add_quantity(report, "cost of " + what, "weft", "cost", "us", seconds * 1e6);
  };
  cost("a message, tcp", costs.tcp_message);
  cost("a message, shm", costs.shm_message);
  cost("a store's request", costs.store_request);
  cost("a connection, one end", costs.connection);
  cost("joining, a rank's processor", costs.joining);
  cost("all_reduce 64 MiB, 2 ranks, shm", costs.all_reduce_host);
  char figures[200];
  std::snprintf(figures, sizeof figures,
                "network of the model: %.1f us one way, %.0f Gbit/s and %.0f ranks a host; the "
                "formulas are in profiling/bench/scale_model.h",
                network.latency * 1e6, network.bandwidth * 8e-9, network.ranks_per_host);
  report.note(figures);
  for (const int ranks : {1000, 10'000, 100'000}) {
    const std::string name = "model " + std::to_string(ranks) + " ranks: ";
    const auto weft = weft_at(ranks, costs, network), gloo = gloo_at(ranks, costs, network),
               nccl = nccl_bootstrap_at(ranks, costs, network);
    const auto row = [&](const std::string& what, const std::string& peer, double seconds) {
      add_quantity(report, name + what, peer, what, "ms", seconds * 1e3);
    };
    row("join", "weft", weft.join);
    row("join", "gloo", gloo.join);
    row("join", "NCCL's bootstrap", nccl.join);
    row("tell death", "weft", weft.tell_death);
    row("tell death", "gloo", gloo.tell_death);
    row("all_reduce 4 B", "weft", weft.all_reduce_small);
    row("all_reduce 4 B", "gloo", gloo.all_reduce_small);
    row("all_reduce 64 MiB", "weft", weft.all_reduce_large);
    row("all_reduce 64 MiB", "gloo", gloo.all_reduce_large);
  }
}

// Takes the network's figures out of the arguments.
weft::bench::Network network_of(int& argc, char** argv) {
  weft::bench::Network network;
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const double value = i + 1 < argc ? std::atof(argv[i + 1]) : 0;
    const bool is_ours =
        option == "--latency-us" || option == "--gbit" || option == "--ranks-per-host";
    if (!is_ours || value <= 0) {
      argv[kept++] = argv[i];
      continue;
    }
    if (option == "--latency-us") network.latency = value * 1e-6;
    if (option == "--gbit") network.bandwidth = value * 1e9 / 8;
    if (option == "--ranks-per-host") network.ranks_per_host = value;
    ++i;
  }
  argc = kept;
  return network;
}

}  // namespace

int main(int argc, char** argv) {
  const weft::bench::Network network = network_of(argc, argv);
  weft::bench::Report report("scale", argc, argv, /*default_runs=*/5);
  const std::string mpi = weft::bench::build_peer(
      report, "mpi", "command -v mpirun && mpicxx -O2 -std=c++17 " SCALE_MPI " -o $OUT");
  for (const int ranks : {2, 16, 64}) measure_joining(report, ranks, mpi);
  for (const std::string backend : {"weft", "tcp"}) measure_group(report, 64, backend);
  measure_group(report, 256, "tcp");
  measure_deaths(report, 64);
  model(report, network);
  return report.finish();
}
