// SPDX-License-Identifier: Apache-2.0
// Measures the cost of an iteration of distributed training between two workers on one host, each
// on a core of its own: the listing of the field's overview (two tensors on another worker, their
// sum here, backward, a step of SGD), the same with tensors and optimizer kept, and a model in two
// stages. Compares Weft over shared memory and TCP with Python's torch.distributed.autograd on the
// same torch, and with the same work in one process. Then measures concurrent passes of one worker,
// and, over links in one process that count and can be slow (autograd_linked.cc), the messages and
// bytes of a step, its round trips, and how much of a slow link a model in two stages hides.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include <torch/torch.h>

#include <weft/profiling/bench/autograd_listing.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>

namespace {

using weft::bench::Kept;
using weft::bench::now;

struct Case {
  const char* name;
  int iterations;  // iterations in one sample
  int samples;
};
constexpr Case kCases[] = {{"listing", 20, 20},      {"listing, fetched together", 20, 20},
                           {"kept", 40, 20},         {"kept, fetched together", 40, 20},
                           {"kept, queued", 40, 20}, {"kept exact", 40, 20},
                           {"two stages", 2, 10}};

const Case& case_named(const std::string& name) {
  for (const Case& one : kCases) {
    if (name == one.name) return one;
  }
  std::fprintf(stderr, "autograd_bench: no case '%s'\n", name.c_str());
  std::exit(1);
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
  auto agent = weft::rpc::init("worker" + std::to_string(weft::bench::rank_of_worker()),
                               {.transports = {transport}});
  if (agent.self().rank == 0) {
    if (std::strcmp(one.name, "two stages") == 0) {
      weft::bench::TwoStages model(agent);
      measure(one, [&] { weft::bench::two_stages(agent, model); });
    } else {
      const Kept with(agent);
      const auto& how = weft::bench::iteration_named(one.name);
      measure(one, [&] { weft::bench::iterate(agent, with, how); });
    }
  }
  agent.shutdown();
  return 0;
}

// Measures the same without workers.
int work_alone(const Case& one) {
  weft::bench::pin_to_core(0);
  torch::set_num_threads(1);
  if (std::strcmp(one.name, "two stages") == 0) {
    auto stage = weft::bench::make_stage();
    weft::bench::LastStage last;
    const auto input = torch::rand({weft::bench::kBatch, weft::bench::kWidth});
    measure(one, [&] {
      std::vector<at::Tensor> outs;
      for (int i = 0; i < weft::bench::kStagedBatches; ++i)
        outs.push_back(last.loss(stage->forward(input)));
      for (auto* module : {&stage, &last.net}) (*module)->zero_grad();
      at::stack(outs).sum().backward();
    });
    return 0;
  }
  std::optional<at::Tensor> first, second;
  measure(one, [&] {
    if (!first || std::string(one.name).starts_with("listing")) {
      first = weft::bench::random_tensor();
      second = weft::bench::random_tensor();
    }
    torch::optim::SGD optimizer({*first, *second}, weft::bench::kSgd);
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
      python != nullptr &&
      std::set<std::string>{"listing", "kept", "two stages"}.contains(one.name)) {
    settings.push_back(
        {"torch.distributed.autograd",
         {python, AUTOGRAD_PYTHON, one.name, std::to_string(std::max(1, one.iterations / 4)),
          std::to_string(one.samples)}});
  }
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      std::istringstream text(weft::bench::run_workers(setting.command, setting.workers).text);
      for (double time = 0; text >> time;) setting.times.add(time);
    }
  }
  for (const Setting& setting : settings) {
    const std::size_t bytes = std::strcmp(one.name, "two stages") == 0
                                  ? weft::bench::kBatch * weft::bench::kWidth * 4
                                  : 36;
    report.add(weft::bench::time_row(one.name, setting.name, bytes, setting.times, 1e6, "us"));
  }
}

// Prints the passes a second of `threads` threads of one worker, with each pass in a context of its
// own, or with libtorch's own backward().
int work_at_once(bool in_contexts, int threads) {
  torch::set_num_threads(1);
  auto agent = weft::rpc::init("worker0", {.transports = {"inproc"}});
  constexpr int kPasses = 100;
  for (int sample = -1; sample < 10; ++sample) {
    std::vector<std::thread> all;
    const double start = now();
    for (int i = 0; i < threads; ++i) {
      all.emplace_back([&] {
        const auto weight = torch::rand({128, 128}).requires_grad_(), x = torch::rand({128, 128});
        for (int pass = 0; pass < kPasses; ++pass) {
          at::Tensor y = x;
          const auto forward = [&] {
            for (int layer = 0; layer < 8; ++layer) y = y.matmul(weight).tanh();
            return y.sum();
          };
          if (in_contexts) {
            weft::AutogradContext context(agent);
            context.backward({forward()});
          } else {
            weight.mutable_grad() = at::Tensor();
            forward().backward();
          }
        }
      });
    }
    for (auto& thread : all) thread.join();
    if (sample >= 0) std::printf("%.3f ", kPasses * threads / (now() - start));
  }
  std::printf("\n");
  agent.shutdown();
  return 0;
}

void at_once(weft::bench::Report& report, const std::string& self) {
  const std::string row = "passes at once";
  if (!report.wants(row)) return;
  struct Peer {
    std::string name, how, threads;
    weft::bench::Samples rates = {};
  };
  std::vector<Peer> peers;
  for (const char* threads : {"1", "2"}) {
    const std::string behind =
        std::string(", ") + threads + (*threads == '1' ? " thread" : " threads");
    peers.push_back({"weft" + behind, "contexts", threads});
    peers.push_back({"libtorch" + behind, "libtorch", threads});
  }
  for (int round = 0; round < report.runs(); ++round) {
    for (Peer& peer : peers) {
      std::istringstream text(
          weft::bench::run_workers({self, "--at-once", peer.how, peer.threads}, 1).text);
      for (double rate = 0; text >> rate;) peer.rates.add(rate);
    }
  }
  for (const Peer& peer : peers) {
    report.add({row, peer.name, 0, "passes", "1/s", peer.rates.quantile(0.5),
                peer.rates.quantile(0.01), peer.rates.count()});
  }
}

std::vector<double> numbers_of(const std::string& self, const std::string& what) {
  std::istringstream text(weft::bench::run_workers({self, "--linked", what}, 1).text);
  return {std::istream_iterator<double>(text), {}};
}

void count(const std::string& name, weft::bench::Report& report, const std::string& self) {
  const std::string row = "per step: " + name;
  if (!report.wants(row)) return;
  const auto numbers = numbers_of(self, "count:" + name);
  const auto bytes = static_cast<std::size_t>(numbers.at(1));
  report.add({row, "weft", bytes, "messages", "msgs", numbers[0], numbers[0], 1});
  report.add({row, "weft", bytes, "bytes", "B", numbers[1], numbers[1], 1});
}

void go_far(const std::string& name, weft::bench::Report& report, const std::string& self) {
  const std::string row = "round trips of 10 ms: " + name;
  if (!report.wants(row)) return;
  weft::bench::Samples trips;
  for (const double one : numbers_of(self, "far:" + name)) trips.add(one);
  report.add({row, "weft", 36, "round trips", "trips", trips.quantile(0.5), trips.quantile(0.99),
              trips.count()});
}

// Compares a step with the longer of computing and communicating, and reports the share of
// communication that does not lengthen it. `kind`: "stages" compute, and need the cores that
// sending needs too; "waiting stages" only wait.
void two_stages(const std::string& kind, const char* share, weft::bench::Report& report,
                const std::string& self) {
  const std::string row = "two " + kind + ", link " + share + " x compute";
  if (!report.wants(row)) return;
  std::vector<weft::bench::Samples> found(7);
  for (int round = 0; round < report.runs(); ++round) {
    auto numbers = numbers_of(self, kind + ":" + share);
    const double compute = numbers.at(0), without = numbers.at(2), limited = numbers.at(3),
                 link = numbers.at(4);
    numbers.push_back(limited / std::max(compute, link));
    numbers.push_back(100 * (1 - std::max(0.0, limited - without) / link));
    for (std::size_t i = 0; i < found.size(); ++i) found[i].add(numbers[i]);
  }
  const char* peers[] = {"one stage alone", "one process", "weft, no limit", "weft",
                         "the link alone"};
  for (const std::size_t i : {3, 2, 0, 1, 4})
    report.add(weft::bench::time_row(row, peers[i], 0, found[i], 1e3, "ms"));
  const auto add = [&](const char* metric, const char* unit, const weft::bench::Samples& of,
                       double bad) {
    report.add({row, "weft", 0, metric, unit, of.quantile(0.5), of.quantile(bad), of.count()});
  };
  add("step over the longer of compute and link", "x", found[5], 0.99);
  // A link that takes longer than the computation cannot be hidden.
  if (std::atof(share) <= 1) add("communication hidden", "%", found[6], 0.01);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], case_named(argv[3]));
  if (argc == 3 && std::strcmp(argv[1], "--alone") == 0) return work_alone(case_named(argv[2]));
  if (argc == 4 && std::strcmp(argv[1], "--at-once") == 0) {
    return work_at_once(std::strcmp(argv[2], "contexts") == 0, std::atoi(argv[3]));
  }
  if (argc == 3 && std::strcmp(argv[1], "--linked") == 0) return weft::bench::work_linked(argv[2]);
  weft::bench::Report report("autograd", argc, argv, /*default_runs=*/3);
  if (std::getenv("WEFT_BENCH_PYTHON") == nullptr) {
    report.note(
        "torch.distributed.autograd is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  const std::string self = weft::bench::this_program();
  for (const Case& one : kCases) {
    if (report.wants(one.name)) compare(one, report, self);
  }
  at_once(report, self);
  for (const auto& how : weft::bench::kIterations) count(how.name, report, self);
  for (const auto& how : weft::bench::kIterations) go_far(how.name, report, self);
  for (const char* kind : {"stages", "waiting stages"}) {
    for (const char* share : {"0.5", "2"}) two_stages(kind, share, report, self);
  }
  return report.finish();
}
