// What a remote call costs, between two workers on one host, each on a core of its own: Weft over shared memory and TCP,
// against Python's torch.distributed.rpc on the same torch.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>

#include <torch/torch.h>

#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

using weft::bench::now;

struct Case {
  const char* name;
  std::size_t bytes;
  int calls;  // of one sample
  int samples;
  int at_once;  // calls under way; 1: each waits for the one before
};
constexpr Case kCases[] = {
    {"number", 8, 200, 50, 1},           {"number inline", 8, 200, 50, 1},      {"tensor 8 B", 8, 200, 50, 1},
    {"tensor 1 MiB", 1 << 20, 4, 50, 1}, {"tensor 64 MiB", 64 << 20, 1, 15, 1}, {"numbers, 64 at once", 8, 2000, 20, 64},
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

// One call after the other, or many at once; the seconds that each call took.
std::vector<double> measure(const weft::rpc::Agent& agent, const Case& one) {
  const auto tensor = torch::zeros({static_cast<std::int64_t>(one.bytes / 4)});
  const std::string name = one.name;
  const auto call = [&] {
    if (name == "number") return static_cast<void>(agent.sync<&add>(1, 1, 2));
    if (name == "number inline") return static_cast<void>(agent.sync<weft::rpc::inline_<&add>>(1, 1, 2));
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
  auto agent = weft::rpc::init("worker" + std::to_string(weft::bench::rank_of_worker()), {.transports = {transport}});
  if (agent.self().rank == 0) {
    for (const double time : measure(agent, one)) std::printf("%.9f ", time);
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

void compare(const Case& one, weft::bench::Report& report, const std::string& self) {
  std::vector<Setting> settings;
  for (const char* transport : {"shm", "tcp"}) {
    settings.push_back({std::string("weft ") + transport, {self, "--worker", transport, one.name}});
  }
  if (const char* python = std::getenv("WEFT_BENCH_PYTHON");
      python != nullptr && std::strcmp(one.name, "number inline") != 0) {
    const auto number = [](auto value) { return std::to_string(value); };
    settings.push_back(
        {"torch.distributed.rpc",
         {python, RPC_PYTHON, std::strncmp(one.name, "number", 6) == 0 ? "number" : "tensor", number(one.bytes),
          number(std::max(1, one.calls / 10)), number(one.samples), number(one.at_once)}});
  }
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      std::istringstream text(weft::bench::run_workers(setting.command, 2).text);
      for (double time = 0; text >> time;) setting.times.add(time);
    }
  }
  for (const Setting& setting : settings) {
    report.add(weft::bench::time_row(one.name, setting.name, one.bytes, setting.times, 1e6, "us"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], case_named(argv[3]));
  weft::bench::Report report("rpc", argc, argv, /*default_runs=*/3);
  if (std::getenv("WEFT_BENCH_PYTHON") == nullptr) {
    report.note("torch.distributed.rpc is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  const std::string self = weft::bench::this_program();
  for (const Case& one : kCases) {
    if (report.wants(one.name)) compare(one, report, self);
  }
  return report.finish();
}
