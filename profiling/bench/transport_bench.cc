// SPDX-License-Identifier: Apache-2.0
// Measures the cost of a message between two processes of one machine, rank 0 on core 0 and rank 1
// on core 1: round trips of a polling and of a blocking caller, one-way streams, and messages that
// were just written. Compares Weft's backends with TensorPipe, UCX and Open MPI, and with the
// limits of the machine, measured without a library. transport_rounds.h describes the measurements.
// Workers of all settings take turns, over several rounds. Then measures the cost of a connection
// over its stream, by itself.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>

#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/transport_on_gpu.h>
#include <weft/profiling/bench/transport_participants.h>
#include <weft/profiling/bench/transport_rounds.h>
#include <weft/profiling/bench/workers.h>
#include <weft/tests/harness/folder.h>

namespace {

using weft::bench::Report;
using weft::bench::Row;
using weft::bench::Samples;

struct Setting {
  std::string name;
  std::vector<std::string> command;
  int ranks = 2;  // ranks that the bench starts
  std::map<std::size_t, Samples> times = {};
};

// ucx_perftest prints one row for a size: half a round trip, or the bandwidth and rate of a stream.
// The script converts both to the seconds of a round trip or message. The server ends with its
// client.
std::string ucx_script(const std::string& tls, const std::string& name) {
  const bool is_stream = name == "stream";
  const auto& sizes = is_stream ? weft::bench::kStreamSizes : weft::bench::kRoundTripSizes;
  std::string list;
  for (const std::size_t bytes : sizes) list += " " + std::to_string(bytes);
  const std::string environment = "UCX_TLS=" + tls +
                                  (tls == "tcp,self" ? " UCX_NET_DEVICES=lo" : "") +
                                  " UCX_WARN_UNUSED_ENV_VARS=n";
  const std::string column = is_stream ? "1/$NF" : "2e-6*$2";
  return "export " + environment + "; export LC_ALL=C; for s in" + list +
         "; do n=20000; [ $s -gt 1024 ] && n=2000; [ $s -gt 65536 ] && n=200; [ $s -gt 1048576 ] "
         "&& n=20; "
         "if [ $RANK = 1 ]; then ucx_perftest -c 1 -p $MASTER_PORT >/dev/null 2>&1; else "
         "for try in $(seq 200); do r=$(ucx_perftest 127.0.0.1 -c 0 -p $MASTER_PORT -t " +
         (is_stream ? "tag_bw -O 64" : "tag_lat") +
         " -s $s -n $n -w $((n/10+1)) -f 2>/dev/null | awk '$1 ~ /^[0-9]+$/ {print " + column +
         "}'); [ -n \"$r\" ] && break; sleep 0.05; done; echo \"$s $r\"; fi; done";
}

// The environment of workers that speak TLS, with a certificate that signs itself. Empty, with a
// note, if none can be made.
std::vector<std::string> tls_environment(const Report& report) {
  static const weft::harness::Folder folder;
  const std::string certificate = folder.path() + "/certificate.pem";
  const std::string key = folder.path() + "/key.pem";
  const std::string make =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
      "/CN=bench "
      "-addext subjectAltName=IP:127.0.0.1,IP:::1 -keyout " +
      key + " -out " + certificate + " 2>/dev/null";
  if (std::system(make.c_str()) != 0) {
    report.note("TLS is not measured: the program openssl made no certificate");
    return {};
  }
  return {"env", "WEFT_TLS_CERT=" + certificate, "WEFT_TLS_KEY=" + key,
          "WEFT_TLS_CA=" + certificate};
}

std::vector<Setting> settings_of(const std::string& wire, const std::string& name,
                                 const Report& report, const std::string& mpi,
                                 const std::string& tensorpipe) {
  const std::string self = weft::bench::this_program();
  const bool is_shm = wire == "shm";
  std::vector<Setting> settings{{"weft", {self, "--worker", wire, name}}};
  if (wire == "cuda_ipc") {
    settings.push_back({"floor: device copy", {self, "--floor", "device copy", name}, 1});
    if (name != "stream")
      settings.push_back({"floor: copies in turn", {self, "--floor", "copies in turn", name}, 1});
    return settings;
  }
  if (wire == "tcp" && name == "stream") {
    settings.push_back({"weft x4", {"env", "WEFT_TCP_SOCKETS=4", self, "--worker", wire, name}});
  }
  if (!is_shm) {
    if (auto command = tls_environment(report); !command.empty()) {
      command.insert(command.end(), {self, "--worker", wire, name});
      settings.push_back({"weft with TLS", command});
    }
  }
  if (!tensorpipe.empty())
    settings.push_back({"TensorPipe", {tensorpipe, is_shm ? "shm" : "uv", name}});
  if (name != "blocked") {
    // These two always poll. UCX's own program sends memory that nobody writes.
    if (name == "fresh") {
      report.note(wire + " fresh: UCX is not measured, ucx_perftest has no such mode");
    } else if (std::system("command -v ucx_perftest >/dev/null") == 0) {
      settings.push_back(
          {"UCX", {"bash", "-c", ucx_script(is_shm ? "posix,cma,self" : "tcp,self", name)}});
    } else {
      report.note("UCX is not measured: no ucx_perftest (ucx-utils)");
    }
    if (!mpi.empty()) {
      const std::vector<std::string> lane =
          is_shm ? std::vector<std::string>{"vader,self"}
                 : std::vector<std::string>{"tcp,self", "--mca", "btl_tcp_if_include", "lo"};
      std::vector<std::string> command{"mpirun",
                                       "--allow-run-as-root",
                                       "--oversubscribe",
                                       "--bind-to",
                                       "none",
                                       "-n",
                                       "2",
                                       "--mca",
                                       "pml",
                                       "ob1",
                                       "--mca",
                                       "btl"};
      command.insert(command.end(), lane.begin(), lane.end());
      command.insert(command.end(), {mpi, name});
      settings.push_back({"Open MPI", command, 1});
    }
  }
  const auto floor = [&](const std::string& which) {
    settings.push_back({"floor: " + which, {self, "--floor", which, name}, 1});
  };
  if (!is_shm) {
    floor("raw socket");
  } else if (name == "fresh") {
    floor("two-copy ring");
    floor("one copy");
  } else if (name == "stream") {
    floor("two-copy ring");
    floor("memcpy");
  } else {
    floor("spinning flag");
  }
  return settings;
}

void run_once(Setting& setting) {
  std::istringstream lines(weft::bench::run_workers(setting.command, setting.ranks).text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream numbers(line);
    std::size_t bytes = 0;
    numbers >> bytes;
    for (double time = 0; numbers >> time;) setting.times[bytes].add(time);
    setting.times[bytes].end_round();
  }
}

// Reports the rate of small messages and the bandwidth of large ones.
Row stream_row(const std::string& name, const std::string& peer, std::size_t bytes,
               const Samples& seconds) {
  const bool is_small = bytes <= 1 << 10;
  const double amount = is_small ? 1e-6 : static_cast<double>(bytes) / (1 << 30);
  return {name,
          peer,
          bytes,
          is_small ? "rate" : "bandwidth",
          is_small ? "M/s" : "GiB/s",
          amount / seconds.quantile(0.5),
          amount / seconds.quantile(0.99),
          seconds.count(),
          seconds.spread()};
}

void measure(const std::string& wire, const std::string& name, Report& report,
             const std::string& mpi, const std::string& tensorpipe) {
  auto settings = settings_of(wire, name, report, mpi, tensorpipe);
  weft::bench::add_before(settings, report);
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) run_once(setting);
  }
  const bool is_stream = name == "stream";
  const auto& sizes = is_stream         ? weft::bench::kStreamSizes
                      : name == "fresh" ? weft::bench::kFreshSizes
                                        : weft::bench::kRoundTripSizes;
  for (const std::size_t bytes : sizes) {
    const std::string kind = is_stream || name == "fresh" ? " " : " round trip ";
    const std::string row = wire + " " + name + kind + std::to_string(bytes);
    for (Setting& setting : settings) {
      const auto found = setting.times.find(bytes);
      if (found == setting.times.end() || found->second.count() == 0) {
        // A floor may have only one size.
        if (setting.name.rfind("floor", 0) != 0)
          report.note(row + ": " + setting.name + " gave no figure");
        continue;
      }
      report.add(is_stream
                     ? stream_row(row, setting.name, bytes, found->second)
                     : weft::bench::time_row(row, setting.name, bytes, found->second, 1e6, "us"));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  if (argc == 4 && words[1] == "--worker") return weft::bench::be_weft(words[2], words[3]);
  if (argc == 4 && words[1] == "--floor") return weft::bench::be_floor(words[2], words[3]);
  Report report("transport", argc, argv, /*default_runs=*/5, /*takes_before=*/true);
  if (const auto why = weft::bench::why_no_gpu()) {
    report.note("no GPU cases: " + *why);
  } else {
    // Leaves out blocking callers: they block on the host, which takes no part in these cases.
    for (const std::string name : {"polled", "stream"}) {
      if (report.wants("cuda_ipc " + name)) measure("cuda_ipc", name, report, "", "");
    }
  }
  weft::bench::measure_costs(report);
  std::vector<std::pair<std::string, std::string>> cases;
  for (const std::string wire : {"shm", "tcp"}) {
    for (const std::string name : {"polled", "blocked", "stream", "fresh"}) {
      if (name == "fresh" && wire != "shm") continue;  // sockets copy every message anyway
      if (report.wants(wire + " " + name)) cases.emplace_back(wire, name);
    }
  }
  if (cases.empty()) return report.finish();
  const std::string options = " -O2 -std=c++17 -w " TRANSPORT_BENCH_SOURCES "/transport_";
  const std::string mpi =
      weft::bench::build_peer(report, "mpi", "mpicxx" + options + "mpi.cc -o $OUT");
  const std::string tensorpipe = weft::bench::build_peer(
      report, "tensorpipe", "c++" + options + "tensorpipe.cc -o $OUT -ltensorpipe -lpthread");
  for (const auto& [wire, name] : cases) measure(wire, name, report, mpi, tensorpipe);
  return report.finish();
}
