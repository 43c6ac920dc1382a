// SPDX-License-Identifier: Apache-2.0
// Measures collectives over two hosts with two ranks each and a slow network between them: 1 Gbit/s
// each way and 0.5 ms one way, as DelayedHosts makes it on one machine. Weft in two levels (within
// and between hosts) and flat (WEFT_HIERARCHY=off), Gloo (through c10d) and Open MPI, beside the
// floor: the time that the bytes need which have to cross at that rate, and one trip.
//
// The peer "socket" sends as many bytes each way over one raw TCP connection between the hosts. It
// shows how near to the floor this network lets anybody come: packets have headers, and processors
// that also run the ranks carry them.
//
// A worker process runs all cases of one peer; the workers take turns, over several rounds.
// hosts_rounds.h says how a call is timed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/torch.h>

#include <weft/profiling/bench/delayed_hosts.h>
#include <weft/profiling/bench/hosts_rounds.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

using weft::bench::DelayedHosts;
using weft::bench::HostsCase;
using weft::bench::HostsRounds;

constexpr int kHosts = 2, kRanksPerHost = 2, kRanks = kHosts * kRanksPerHost;
constexpr auto kOneWay = std::chrono::microseconds(500);
constexpr double kBitsPerSecond = 1e9;

struct Case : HostsCase {
  double aim = 0;  // times the floor; 0: none
};
const std::vector<Case> kCases{{{"all_reduce", 64 << 20, 3}, 1.15}, {{"all_reduce", 1 << 20, 40}},
                               {{"all_reduce", 64 << 10, 100}},     {{"all_reduce", 8, 300}, 1.3},
                               {{"all_gather", 1 << 20, 30}},       {{"broadcast", 1 << 20, 40}},
                               {{"all_to_all", 1 << 20, 30}},       {{"all_to_all", 32 << 10, 100}},
                               {{"all_to_all", 8 << 10, 100}},      {{"all_to_all", 32, 300}}};

std::string name_of(const HostsCase& one) {
  return one.operation + " " + std::to_string(one.bytes);
}

// Bytes that each host has to send to the other one; of a broadcast, only root's host.
std::size_t bytes_to_cross(const HostsCase& one) {
  if (one.operation == "all_reduce") return 2 * (kHosts - 1) * one.bytes / kHosts;
  if (one.operation == "all_to_all") return kRanksPerHost * (kHosts - 1) * one.bytes / kHosts;
  return one.operation == "all_gather" ? kRanksPerHost * one.bytes : one.bytes;
}

double floor_of(const HostsCase& one) {
  const std::size_t bytes = bytes_to_cross(one);
  const auto limited = static_cast<double>(bytes - std::min(bytes, DelayedHosts::kBurstBytes));
  return limited * 8 / kBitsPerSecond + std::chrono::duration<double>(kOneWay).count();
}

// --- Workers ---

int work(const std::string& backend, HostsRounds& rounds, const std::vector<HostsCase>& cases) {
  at::set_num_threads(1);
  weft::ProcessGroup group = weft::init_process_group({.backend = backend});
  for (const HostsCase& one : cases) {
    const auto count = static_cast<std::int64_t>(one.bytes / sizeof(float));
    auto tensor = at::zeros({count});
    auto result = at::zeros({one.operation == "all_gather" ? count * kRanks : count});
    rounds.run(one, [&] {
      if (one.operation == "all_reduce") {
        group.all_reduce(tensor).wait();
      } else if (one.operation == "broadcast") {
        group.broadcast(tensor, 0).wait();
      } else if (one.operation == "all_to_all") {
        group.all_to_all_single(result, tensor).wait();
      } else {
        group.all_gather_into(result, tensor).wait();
      }
    });
  }
  group.barrier().wait();
  return 0;
}

// One connection between the first ranks of the hosts; -1 for other ranks.
int connect_hosts(int rank, HostsRounds& rounds) {
  const auto require = [](int result) {
    if (result >= 0) return result;
    std::perror("hosts_bench: the peer 'socket'");
    std::exit(2);
  };
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT"))));
  inet_pton(AF_INET, DelayedHosts::address(1).c_str(), &address.sin_addr);
  const auto* const where = reinterpret_cast<const sockaddr*>(&address);
  const bool listens = rank == kRanksPerHost;
  const int own = require(socket(AF_INET, SOCK_STREAM, 0));
  if (listens) require(bind(own, where, sizeof address)), require(listen(own, 1));
  rounds.meet();
  if (rank != 0 && !listens) return -1;
  const int other = listens ? require(accept(own, nullptr, nullptr))
                            : (require(connect(own, where, sizeof address)), own);
  const int yes = 1;
  require(setsockopt(other, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes));
  return other;
}

int work_on_sockets(int rank, HostsRounds& rounds, const std::vector<HostsCase>& cases) {
  constexpr std::size_t kAtOnce = 64 << 10;  // what a connection takes while nobody receives
  const int other = connect_hosts(rank, rounds);
  for (const HostsCase& one : cases) {
    std::vector<std::byte> out(bytes_to_cross(one)), in(out.size());
    const bool is_one_way = one.operation == "broadcast";
    const bool sends = other >= 0 && (!is_one_way || rank == 0);
    const bool receives = other >= 0 && (!is_one_way || rank != 0);
    const auto send_all = [&] {
      if (send(other, out.data(), out.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(out.size()))
        std::exit(2);
    };
    rounds.run(one, [&] {
      std::thread sender;
      if (sends && receives && out.size() > kAtOnce) {
        sender = std::thread(send_all);
      } else if (sends) {
        send_all();
      }
      if (receives &&
          recv(other, in.data(), in.size(), MSG_WAITALL) != static_cast<ssize_t>(in.size()))
        std::exit(2);
      if (sender.joinable()) sender.join();
    });
  }
  return 0;
}

int run_worker(int argc, char** argv) {
  const std::string peer = argv[2];
  const int rank = weft::bench::rank_of_worker();
  HostsRounds rounds(argv[3], rank, kRanks);
  std::vector<HostsCase> cases;
  for (int i = 4; i < argc; ++i) cases.push_back(HostsCase::from(argv[i]));
  return peer == "socket" ? work_on_sockets(rank, rounds, cases) : work(peer, rounds, cases);
}

// --- The bench ---

struct Setting {
  std::string name;
  std::vector<std::string> command;
  std::map<std::string, std::string> environment = {};
  std::map<std::string, weft::bench::Samples> times = {};  // by case
};

// mpirun runs on the first host, and starts its ranks on the second one through the agent.
Setting open_mpi(const DelayedHosts& hosts, const std::string& program) {
  std::string places;
  for (int host = 0; host < kHosts; ++host) {
    places +=
        (host == 0 ? "" : ",") + DelayedHosts::address(host) + ":" + std::to_string(kRanksPerHost);
  }
  const std::string interface = DelayedHosts::kInterface;
  return {"Open MPI",
          {"mpirun",
           "--allow-run-as-root",
           "--bind-to",
           "none",
           "--host",
           places,
           "-n",
           std::to_string(kRanks),
           "--mca",
           "plm_rsh_agent",
           hosts.agent(),
           "--mca",
           "oob_tcp_if_include",
           interface,
           "--mca",
           "btl_tcp_if_include",
           interface,
           "--mca",
           "pml",
           "ob1",
           "--mca",
           "btl",
           "tcp,vader,self",
           program}};
}

std::vector<Setting> settings_of(const weft::bench::Report& report, const DelayedHosts& hosts,
                                 const std::string& path, const std::vector<Case>& cases) {
  const std::string self = weft::bench::this_program();
  std::vector<Setting> settings{
      {"weft", {self, "--worker", "weft"}, {{"WEFT_HIERARCHY", "auto"}}},
      {"weft flat", {self, "--worker", "weft"}, {{"WEFT_HIERARCHY", "off"}}},
      {"gloo (c10d)", {self, "--worker", "gloo"}}};
  const std::string mpi =
      weft::bench::build_peer(report, "mpi",
                              "command -v mpirun && mpicxx -O2 -std=c++17 -I" HOSTS_SOURCES
                              " " HOSTS_SOURCES "/hosts_mpi.cc -o $OUT");
  if (!mpi.empty()) settings.push_back(open_mpi(hosts, mpi));
  settings.push_back({"socket", {self, "--worker", "socket"}});
  weft::bench::add_before(settings, report);
  for (Setting& setting : settings) {
    setting.command.push_back(path);
    for (const Case& one : cases) setting.command.push_back(one.text());
    setting.command = hosts.wrap(setting.command, kRanksPerHost);
  }
  return settings;
}

void run_in_turns(std::vector<Setting>& settings, int rounds) {
  const std::string interface = DelayedHosts::kInterface;
  for (int round = 0; round < rounds; ++round) {
    for (Setting& setting : settings) {
      std::map<std::string, std::string> environment = setting.environment;
      environment.insert({{"WEFT_LOG", "error"},  // nobody else reaches the ports, so no warnings
                          {"MASTER_ADDR", DelayedHosts::address(0)},
                          {"WEFT_SOCKET_IFNAME", interface},
                          {"GLOO_SOCKET_IFNAME", interface}});
      const int processes = setting.name == "Open MPI" ? 1 : kRanks;
      std::istringstream lines(
          weft::bench::run_workers(setting.command, processes, environment).text);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        HostsCase one;
        words >> one.operation >> one.bytes;
        auto& times = setting.times[name_of(one)];
        for (double time = 0; words >> time;) times.add(time);
        times.end_round();
      }
    }
  }
}

void add_rows(weft::bench::Report& report, const std::vector<Case>& cases,
              std::vector<Setting>& settings) {
  for (const Case& one : cases) {
    for (Setting& setting : settings) {
      const auto& times = setting.times[name_of(one)];
      if (times.count() == 0) {
        report.note(setting.name + " gave no time for " + name_of(one));
        continue;
      }
      report.add(weft::bench::time_row(name_of(one), setting.name, one.bytes, times, 1e3, "ms"));
    }
    const double floor = floor_of(one);
    report.add({name_of(one), "floor", one.bytes, "time", "ms", floor * 1e3, floor * 1e3, 1});
  }
  for (const Case& one : cases) {
    char line[120];
    std::snprintf(line, sizeof line, "%s: weft takes %.2f times the floor", name_of(one).c_str(),
                  settings.front().times[name_of(one)].quantile(0.5) / floor_of(one));
    char aim[40] = "";
    if (one.aim > 0) std::snprintf(aim, sizeof aim, " (aim: %.2f)", one.aim);
    report.note(std::string(line) + aim);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 3 && std::strcmp(argv[1], "--worker") == 0) return run_worker(argc, argv);
  weft::bench::Report report("hosts", argc, argv, /*default_runs=*/3, /*takes_before=*/true);
  std::vector<Case> cases;
  for (const Case& one : kCases) {
    if (report.wants(name_of(one))) cases.push_back(one);
  }
  if (cases.empty()) return report.finish();
  std::string why_not;
  // Static, so that it also ends if the bench exits because a worker has failed.
  static const auto hosts =
      DelayedHosts::make(kHosts, {.one_way = kOneWay, .bits_per_second = kBitsPerSecond}, why_not);
  const std::string path = HostsRounds::make(kRanks);
  if (!hosts || path.empty()) {
    report.note("nothing is measured: " + (hosts ? "no shared memory" : why_not));
    return 1;
  }
  if (!hosts->why_late().empty()) report.note(hosts->why_late() + "; trips take longer");
  auto settings = settings_of(report, *hosts, path, cases);
  run_in_turns(settings, report.runs());
  add_rows(report, cases, settings);
  return report.finish();
}
