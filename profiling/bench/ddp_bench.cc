// SPDX-License-Identifier: Apache-2.0
// Measures how much of a data-parallel step is communication that compute does not hide, and how
// long a job takes to its first step: Weft's DistributedDataParallel compared with Python's on the
// same torch, and both with no communication at all. Also measures an optimizer whose state is
// divided among the ranks, with and without overlap of its steps and messages with backward.
//
// Two ranks, each pinned to a core of its own, with one compute thread each. A worker process runs
// one setting: start-up, warm-up, then timed steps. Workers of all settings take turns over several
// rounds, so that noise of the machine affects all of them.
//
//   small: MLP 784-512-512-10, batch 64 a rank
//   large: MLP 784-4096-4096-1024-10 (about 24 M parameters), batch 32 a rank
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include <torch/torch.h>

#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

struct Model {
  const char* name;
  std::vector<std::int64_t> widths;
  std::int64_t batch;
  int warm_up;
  int steps;
};

const std::vector<Model> kModels{{"small", {784, 512, 512, 10}, 64, 20, 150},
                                 {"large", {784, 4096, 4096, 1024, 10}, 32, 4, 12}};

const Model& model_named(const std::string& name) {
  for (const Model& model : kModels) {
    if (name == model.name) return model;
  }
  std::fprintf(stderr, "ddp_bench: no model '%s'\n", name.c_str());
  std::exit(2);
}

torch::nn::Sequential make_net(const Model& model) {
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < model.widths.size(); ++i) {
    net->push_back(torch::nn::Linear(model.widths[i], model.widths[i + 1]));
    if (i + 2 < model.widths.size()) net->push_back(torch::nn::ReLU());
  }
  return net;
}

// Runs one rank of one setting. Rank 0 prints the time of the first step's end and of each timed
// step, in seconds.
int work(const std::string& setting, const Model& model) {
  weft::bench::pin_to_core(std::atoi(std::getenv("LOCAL_RANK")));
  at::set_num_threads(1);
  torch::manual_seed(0);

  weft::ProcessGroup group =
      weft::init_process_group({.backend = std::getenv("WEFT_BENCH_BACKEND")});
  auto net = make_net(model);
  std::optional<weft::DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
  if (setting != "alone") ddp.emplace(net, group);
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (setting == "zero" || setting == "overlap") {
    auto zero = std::make_unique<weft::ZeroRedundancyOptimizer<torch::optim::SGD>>(
        net->parameters(), group, options,
        weft::ZeroOptions{.shard_bytes = 1 << 20, .parameters_as_bucket_view = true});
    if (setting == "overlap") zero->overlap_with(*ddp);
    optimizer = std::move(zero);
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
  }
  const auto inputs = torch::randn({model.batch, model.widths.front()});
  const auto labels = torch::randint(10, {model.batch});
  const auto step = [&] {
    optimizer->zero_grad();
    const auto output = ddp ? ddp->forward(inputs) : net->forward(inputs);
    torch::nn::functional::cross_entropy(output, labels).backward();
    optimizer->step();
  };
  step();
  const double first = weft::bench::now();
  for (int i = 0; i < model.warm_up; ++i) step();
  group.barrier().wait();
  std::vector<double> numbers = weft::bench::time_each(model.steps, step);
  numbers.insert(numbers.begin(), first);
  if (group.rank() == 0) weft::bench::print_numbers(numbers);
  return 0;
}

struct Outcome {
  double start_up = 0;  // from the launch to the end of the first step
  std::vector<double> steps;
};

// Starts two ranks of a worker and reads rank 0's output.
Outcome run(const std::vector<std::string>& command, const std::string& backend) {
  const auto output = weft::bench::run_workers(command, 2, {{"WEFT_BENCH_BACKEND", backend}});
  Outcome outcome;
  std::istringstream stream(output.text);
  double first = 0;
  stream >> first;
  outcome.start_up = first - output.launched;
  for (double time = 0; stream >> time;) outcome.steps.push_back(time);
  return outcome;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  std::string backend;
  // The setting without communication with which it is compared; "" if it is one itself.
  std::string alone;
  weft::bench::Samples steps = {};
  weft::bench::Samples start_ups = {};
};

const weft::bench::Samples& steps_of(const std::vector<Setting>& settings,
                                     const std::string& name) {
  return std::find_if(settings.begin(), settings.end(),
                      [&](const Setting& one) { return one.name == name; })
      ->steps;
}

void measure(const Model& model, weft::bench::Report& report, const std::string& self) {
  const char* python = std::getenv("WEFT_BENCH_PYTHON");
  std::vector<Setting> settings;
  settings.push_back({"weft gloo", {self, "--worker", "weft", model.name}, "gloo", "weft alone"});
  settings.push_back({"weft shm", {self, "--worker", "weft", model.name}, "shm", "weft alone"});
  settings.push_back(
      {"weft zero shm", {self, "--worker", "zero", model.name}, "shm", "weft alone"});
  settings.push_back(
      {"weft zero shm overlap", {self, "--worker", "overlap", model.name}, "shm", "weft alone"});
  settings.push_back({"weft alone", {self, "--worker", "alone", model.name}, "gloo", ""});
  if (python != nullptr) {
    const std::string script = DDP_PYTHON;
    settings.push_back(
        {"python gloo", {python, script, "ddp", model.name}, "gloo", "python alone"});
    settings.push_back({"python alone", {python, script, "alone", model.name}, "gloo", ""});
  } else if (report.before().empty()) {
    report.note(
        "Python's DistributedDataParallel is not measured: WEFT_BENCH_PYTHON names no python with "
        "torch");
  }
  weft::bench::add_before(settings, report);
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      const Outcome outcome = run(setting.command, setting.backend);
      setting.start_ups.add(outcome.start_up);
      for (const double time : outcome.steps) setting.steps.add(time);
      setting.start_ups.end_round();
      setting.steps.end_round();
    }
  }
  const std::string name = model.name;
  std::size_t bytes = 0;
  for (const auto& parameter : make_net(model)->parameters()) bytes += parameter.nbytes();
  for (const Setting& setting : settings)
    report.add(
        weft::bench::time_row(name + " step", setting.name, bytes, setting.steps, 1e3, "ms"));
  for (const Setting& setting : settings) {
    if (setting.alone.empty() || !report.before().empty())
      continue;  // differences are not compared between builds, because they have no spread
    const auto& alone = steps_of(settings, setting.alone);
    weft::bench::Row row{name + " exposed communication",
                         setting.name,
                         bytes,
                         "step - step alone",
                         "ms",
                         0,
                         0,
                         setting.steps.count()};
    row.p50 = 1e3 * (setting.steps.quantile(0.5) - alone.quantile(0.5));
    row.p99 = 1e3 * (setting.steps.quantile(0.99) - alone.quantile(0.99));
    report.add(row);
  }
  for (const Setting& setting : settings) {
    if (setting.alone.empty()) continue;
    report.add(weft::bench::time_row(name + " launch to first step", setting.name, bytes,
                                     setting.start_ups, 1, "s"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0)
    return work(argv[2], model_named(argv[3]));
  weft::bench::Report report("ddp", argc, argv, /*default_runs=*/5, /*takes_before=*/true);
  const std::string self = weft::bench::this_program();
  for (const Model& model : kModels) {
    if (report.wants(model.name)) measure(model, report, self);
  }
  return report.finish();
}
