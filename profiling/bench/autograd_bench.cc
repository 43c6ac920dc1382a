// What an iteration of distributed training costs, between two workers on one host, each on a core of its own: the listing
// of the field's overview (two tensors on another worker, their sum here, backward, a step of SGD), and with tensors and
// optimizer kept. Weft over shared memory and TCP, against Python's torch.distributed.autograd on the same torch, and
// against the same in one process.
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
  int iterations;  // of one sample
  int samples;
};
constexpr Case kCases[] = {{"listing", 20, 20}, {"kept", 40, 20}, {"kept exact", 40, 20}};

const Case& case_named(const std::string& name) {
  for (const Case& one : kCases) {
    if (name == one.name) return one;
  }
  std::fprintf(stderr, "autograd_bench: no case '%s'\n", name.c_str());
  std::exit(1);
}

at::Tensor random_tensor() { return torch::rand({3, 3}, at::TensorOptions().requires_grad(true)); }

using Optimizer = weft::DistributedOptimizer<torch::optim::SGD>;
const torch::optim::SGDOptions kOptions(0.05);

struct Kept {
  explicit Kept(weft::rpc::Agent& agent)
      : first(agent.remote<&random_tensor>(1)),
        second(agent.remote<&random_tensor>(1)),
        optimizer({first, second}, kOptions) {}
  weft::RRef<at::Tensor> first, second;
  Optimizer optimizer;
};

void listing(weft::rpc::Agent& agent) {
  weft::AutogradContext context(agent);
  const auto first = agent.remote<&random_tensor>(1), second = agent.remote<&random_tensor>(1);
  const auto a = first.fetch(), b = second.fetch();
  context.backward({(a.get() + b.get()).sum()});
  Optimizer({first, second}, kOptions).step(context);
}

void kept(weft::rpc::Agent& agent, const Kept& with, weft::BackwardMode mode) {
  weft::AutogradContext context(agent);
  const auto a = with.first.fetch(), b = with.second.fetch();
  context.backward({(a.get() + b.get()).sum()}, {.mode = mode});
  with.optimizer.step(context);
}

template <class Iteration>
void measure(const Case& one, Iteration iteration) {
  for (int sample = -2; sample < one.samples; ++sample) {
    const double start = now();
    for (int i = 0; i < one.iterations; ++i) iteration();
    if (sample >= 0) std::printf("%.9f ", (now() - start) / one.iterations);
  }
  std::printf("\n");
  std::fflush(stdout);
}

int work(const std::string& transport, const Case& one) {
  weft::bench::pin_to_core(weft::bench::rank_of_worker());
  torch::set_num_threads(1);
  auto agent = weft::rpc::init("worker" + std::to_string(weft::bench::rank_of_worker()), {.transports = {transport}});
  if (agent.self().rank == 0) {
    if (std::strcmp(one.name, "listing") == 0) {
      measure(one, [&] { listing(agent); });
    } else {
      const Kept with(agent);
      const auto mode = std::strcmp(one.name, "kept") == 0 ? weft::BackwardMode::Fast : weft::BackwardMode::Exact;
      measure(one, [&] { kept(agent, with, mode); });
    }
  }
  agent.shutdown();
  return 0;
}

// The same without workers.
int work_alone(const Case& one) {
  weft::bench::pin_to_core(0);
  torch::set_num_threads(1);
  std::optional<at::Tensor> first, second;
  measure(one, [&] {
    if (!first || std::strcmp(one.name, "listing") == 0) {
      first = random_tensor();
      second = random_tensor();
    }
    torch::optim::SGD optimizer({*first, *second}, kOptions);
    optimizer.zero_grad();
    (*first + *second).sum().backward();
    optimizer.step();
  });
  return 0;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  int workers = 2;
  weft::bench::Samples times = {};
};

void compare(const Case& one, weft::bench::Report& report, const std::string& self) {
  std::vector<Setting> settings;
  for (const char* transport : {"shm", "tcp"}) {
    settings.push_back({std::string("weft ") + transport, {self, "--worker", transport, one.name}});
  }
  settings.push_back({"one process", {self, "--alone", one.name}, 1});
  if (const char* python = std::getenv("WEFT_BENCH_PYTHON");
      python != nullptr && std::strcmp(one.name, "kept exact") != 0) {
    settings.push_back(
        {"torch.distributed.autograd",
         {python, AUTOGRAD_PYTHON, one.name, std::to_string(one.iterations / 4), std::to_string(one.samples)}});
  }
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      std::istringstream text(weft::bench::run_workers(setting.command, setting.workers).text);
      for (double time = 0; text >> time;) setting.times.add(time);
    }
  }
  for (const Setting& setting : settings) {
    report.add(weft::bench::time_row(one.name, setting.name, 36, setting.times, 1e6, "us"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], case_named(argv[3]));
  if (argc == 3 && std::strcmp(argv[1], "--alone") == 0) return work_alone(case_named(argv[2]));
  weft::bench::Report report("autograd", argc, argv, /*default_runs=*/3);
  if (std::getenv("WEFT_BENCH_PYTHON") == nullptr) {
    report.note("torch.distributed.autograd is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  const std::string self = weft::bench::this_program();
  for (const Case& one : kCases) {
    if (report.wants(one.name)) compare(one, report, self);
  }
  return report.finish();
}
