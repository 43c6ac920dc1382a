// SPDX-License-Identifier: Apache-2.0
// Measures the cost of a remote call between two workers on one host, each on a core of its own:
// Weft over shared memory and TCP, compared with Python's torch.distributed.rpc on the same torch,
// gRPC and Cap'n Proto (both over a unix socket). Then measures nested calls that each block a
// thread until the next one has returned, and chains of dependent calls between hosts 5 ms apart,
// where every round trip counts.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>

#include <unistd.h>

#include <torch/torch.h>

#include <weft/profiling/bench/delayed_hosts.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

using weft::bench::now;

struct Case {
  const char* name;
  std::size_t bytes;
  int calls;  // calls in one sample
  int samples;
  int at_once;  // open calls; 1: each waits for the one before
};
constexpr Case kCases[] = {
    {"number", 8, 200, 50, 1},
    {"number inline", 8, 200, 50, 1},
    {"tensor 8 B", 8, 200, 50, 1},
    {"tensor 1 MiB", 1 << 20, 4, 50, 1},
    {"tensor 64 MiB", 64 << 20, 1, 15, 1},
    {"numbers, 64 at once", 8, 2000, 20, 64},
};

const Case& case_named(const std::string& name) {
  for (const Case& one : kCases) {
    if (name == one.name) return one;
  }
  std::fprintf(stderr, "rpc_bench: no case '%s'\n", name.c_str());
  std::exit(1);
}

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
at::Tensor give_back(at::Tensor tensor) { return tensor; }

// Makes the calls one after the other or many at once; returns the seconds for each call.
std::vector<double> measure(const weft::rpc::Agent& agent, const Case& one) {
  const auto tensor = torch::zeros({static_cast<std::int64_t>(one.bytes / 4)});
  const std::string name = one.name;
  const auto call = [&] {
    if (name == "number") return static_cast<void>(agent.sync<&add>(1, 1, 2));
    if (name == "number inline")
      return static_cast<void>(agent.sync<weft::rpc::inline_<&add>>(1, 1, 2));
    static_cast<void>(agent.sync<&give_back>(1, tensor));
  };
  std::vector<double> times;
  for (int sample = -2; sample < one.samples; ++sample) {
    const double start = now();
    if (one.at_once == 1) {
      for (int i = 0; i < one.calls; ++i) call();
    } else {
      std::vector<weft::Future<std::int64_t>> waiting(static_cast<std::size_t>(one.at_once));
      for (int i = 0; i < one.calls; ++i) {
        auto& place = waiting[static_cast<std::size_t>(i % one.at_once)];
        if (i >= one.at_once) place.get();
        place = agent.async<&add>(1, i, 1);
      }
      for (const auto& call_left : waiting) call_left.get();
    }
    if (sample >= 0) times.push_back((now() - start) / one.calls);
  }
  return times;
}

int work(const std::string& transport, const Case& one) {
  weft::bench::pin_to_core(weft::bench::rank_of_worker());
  torch::set_num_threads(1);
  auto agent = weft::rpc::init("worker" + std::to_string(weft::bench::rank_of_worker()),
                               {.transports = {transport}});
  if (agent.self().rank == 0) {
    for (const double time : measure(agent, one)) std::printf("%.9f ", time);
    std::printf("\n");
    std::fflush(stdout);
  }
  agent.shutdown();
  return 0;
}

// Nested calls: each function blocks in to_here() for a call back to the other worker, so half of
// the calls block threads of each worker. The time of a whole chain shows the cost of a call while
// the other threads block.
constexpr int kNested[] = {100, 400, 1600};
constexpr int kNestedSamples = 3;

std::string nested_case(int calls) { return "nested calls that block, " + std::to_string(calls); }

std::int64_t nest(std::int64_t left) {
  if (left == 0) return 0;
  auto& agent = weft::rpc::this_agent();
  return 1 + agent.remote<&nest>(1 - agent.self().rank, left - 1).to_here();
}

int work_nested(const std::string& transport, int calls) {
  auto agent = weft::rpc::init("worker" + std::to_string(weft::bench::rank_of_worker()),
                               {.timeout = std::chrono::minutes(10), .transports = {transport}});
  if (agent.self().rank == 0) {
    for (int sample = -1; sample < kNestedSamples; ++sample) {
      const double start = now();
      if (agent.sync<&nest>(1, calls - 1) != calls - 1) std::exit(1);
      if (sample >= 0) std::printf("%.9f ", now() - start);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  agent.shutdown();
  return 0;
}

// Chains: each call takes the reference that the call before has made.
constexpr auto kOneWay = std::chrono::milliseconds(5);
constexpr int kLinks = 8;
constexpr int kChainWorkers = 4;  // not counting the caller
constexpr int kChainSamples = 10;
// In the last chain each worker sends its value to the next worker; in the third the next worker
// fetches it, as torch does.
constexpr const char* kChains[] = {"delayed call", "delayed chain of 8, one worker",
                                   "delayed chain of 8, four workers",
                                   "delayed chain of 8, four workers, copies"};

weft::Future<std::int64_t> plus(weft::RRef<std::int64_t> held, std::int64_t more) {
  return held.fetch().then([more](std::int64_t value) { return value + more; });
}
std::int64_t plus_here(std::int64_t& value, std::int64_t more) { return value + more; }

int work_in_chains(const std::string& name) {
  const int rank = weft::bench::rank_of_worker();
  auto agent = weft::rpc::init("worker" + std::to_string(rank), {.transports = {"tcp"}});
  const auto chain = [&] {
    if (name == kChains[0]) return static_cast<void>(agent.sync<&add>(1, 1, 2));
    const int workers = name == kChains[1] ? 1 : kChainWorkers;
    auto value = agent.remote<&add>(1, 0, 1);
    for (int i = 1; i < kLinks; ++i) {
      const int next = 1 + i % workers;
      value = name == kChains[3] ? value.copy_to(next).remote<&plus_here>(1)
                                 : agent.remote<&plus>(next, value, 1);
    }
    if (value.to_here() != kLinks) std::exit(1);
  };
  if (rank == 0) {
    for (int sample = -2; sample < kChainSamples; ++sample) {
      const double start = now();
      chain();
      if (sample >= 0) std::printf("%.9f ", now() - start);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  agent.shutdown();
  return 0;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  weft::bench::Samples times = {};
};

// The programs that the bench has built; "" if it could not.
struct Peers {
  std::string grpc;
  std::string capnp;
  std::filesystem::path sockets;  // the folder for this process's sockets
};

Peers build_peers(const weft::bench::Report& report) {
  const std::string begin = "set -e; mkdir -p $OUT.made; cd $OUT.made; ";
  const std::string compile =
      "c++ -O2 -std=c++17 -w -I. -I" RPC_BENCH_SOURCES " " RPC_BENCH_SOURCES;
  return {
      weft::bench::build_peer(
          report, "grpc",
          begin +
              "protoc -I " RPC_BENCH_SOURCES " --cpp_out=. --grpc_out=. "
              "--plugin=protoc-gen-grpc=$(command -v grpc_cpp_plugin) rpc_peer.proto; " +
              compile +
              "/rpc_grpc.cc rpc_peer.pb.cc rpc_peer.grpc.pb.cc -o $OUT $(pkg-config --libs grpc++ "
              "protobuf)"),
      weft::bench::build_peer(
          report, "capnp",
          begin +
              "capnp compile -oc++:. --src-prefix=" RPC_BENCH_SOURCES " " RPC_BENCH_SOURCES
              "/rpc_peer.capnp; " +
              compile + "/rpc_capnp.cc rpc_peer.capnp.c++ -o $OUT $(pkg-config --libs capnp-rpc)"),
      std::filesystem::temp_directory_path() / ("weft-rpc-bench-" + std::to_string(::getpid())),
  };
}

void run_rounds(const std::string& name, std::size_t bytes, std::vector<Setting>& settings,
                int ranks, weft::bench::Report& report,
                const std::map<std::string, std::string>& environment, double factor,
                const std::string& unit) {
  weft::bench::add_before(settings, report);
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      std::istringstream text(weft::bench::run_workers(setting.command, ranks, environment).text);
      for (double time = 0; text >> time;) setting.times.add(time);
      setting.times.end_round();
    }
  }
  for (const Setting& setting : settings) {
    report.add(weft::bench::time_row(name, setting.name, bytes, setting.times, factor, unit));
  }
}

void compare(const Case& one, weft::bench::Report& report, const std::string& self,
             const Peers& peers) {
  std::vector<Setting> settings;
  for (const char* transport : {"shm", "tcp"}) {
    settings.push_back({std::string("weft ") + transport, {self, "--worker", transport, one.name}});
  }
  const bool is_number = std::strncmp(one.name, "number", 6) == 0;
  if (std::strcmp(one.name, "number inline") != 0) {
    const auto number = [](auto value) { return std::to_string(value); };
    const auto order = [&](int calls) {
      return std::vector<std::string>{is_number ? "number" : "tensor", number(one.bytes),
                                      number(calls), number(one.samples), number(one.at_once)};
    };
    const auto with = [](std::vector<std::string> command, const std::vector<std::string>& words) {
      command.insert(command.end(), words.begin(), words.end());
      return command;
    };
    if (const char* python = std::getenv("WEFT_BENCH_PYTHON")) {
      settings.push_back(
          {"torch.distributed.rpc",
           with({python, RPC_BENCH_SOURCES "/rpc_python.py"}, order(std::max(1, one.calls / 10)))});
    }
    // A socket of its own for each run: a caller takes any existing socket for one with a server.
    const std::string start = "exec \"$0\" \"" + peers.sockets.string() + "/$MASTER_PORT\" \"$@\"";
    for (const auto& [name, program] :
         {std::pair("gRPC", peers.grpc), std::pair("Cap'n Proto", peers.capnp)}) {
      if (!program.empty())
        settings.push_back({name, with({"bash", "-c", start, program}, order(one.calls))});
    }
  }
  run_rounds(one.name, one.bytes, settings, 2, report, {}, 1e6, "us");
}

void compare_nested(weft::bench::Report& report, const std::string& self) {
  for (const int calls : kNested) {
    if (!report.wants(nested_case(calls))) continue;
    std::vector<Setting> settings;
    for (const char* transport : {"shm", "tcp"}) {
      settings.push_back({std::string("weft ") + transport,
                          {self, "--worker-nested", transport, std::to_string(calls)}});
    }
    run_rounds(nested_case(calls), 8, settings, 2, report, {}, 1e3, "ms");
  }
}

void compare_chains(weft::bench::Report& report, const std::string& self) {
  std::string why_not;
  // Static, so that it also ends if the bench exits because a worker has failed.
  static const auto hosts =
      weft::bench::DelayedHosts::make(1 + kChainWorkers, {.one_way = kOneWay}, why_not);
  if (!hosts) return report.note("chains with a delayed link are not measured: " + why_not);
  const std::string interface = weft::bench::DelayedHosts::kInterface;
  for (const std::string chain : kChains) {
    if (!report.wants(chain)) continue;
    std::vector<Setting> settings{{"weft tcp", hosts->wrap({self, "--worker", "chain", chain}, 1)}};
    if (const char* python = std::getenv("WEFT_BENCH_PYTHON")) {
      settings.push_back({"torch.distributed.rpc",
                          hosts->wrap({python, std::string(RPC_BENCH_SOURCES) + "/rpc_python.py",
                                       chain, "8", "1", std::to_string(kChainSamples), "1"},
                                      1)});
    }
    run_rounds(chain, 8, settings, 1 + kChainWorkers, report,
               {{"MASTER_ADDR", weft::bench::DelayedHosts::address(0)},
                {"WEFT_SOCKET_IFNAME", interface},
                {"TP_SOCKET_IFNAME", interface},
                {"GLOO_SOCKET_IFNAME", interface}},
               1e3, "ms");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) {
    return std::strcmp(argv[2], "chain") == 0 ? work_in_chains(argv[3])
                                              : work(argv[2], case_named(argv[3]));
  }
  if (argc == 4 && std::strcmp(argv[1], "--worker-nested") == 0)
    return work_nested(argv[2], std::stoi(argv[3]));
  weft::bench::Report report("rpc", argc, argv, /*default_runs=*/3, /*takes_before=*/true);
  if (std::getenv("WEFT_BENCH_PYTHON") == nullptr && report.before().empty()) {
    report.note(
        "torch.distributed.rpc is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  const std::string self = weft::bench::this_program();
  const Peers peers = build_peers(report);
  std::filesystem::create_directory(peers.sockets);
  for (const Case& one : kCases) {
    if (report.wants(one.name)) compare(one, report, self, peers);
  }
  std::filesystem::remove_all(peers.sockets);
  compare_nested(report, self);
  compare_chains(report, self);
  return report.finish();
}
