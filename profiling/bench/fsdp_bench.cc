// SPDX-License-Identifier: Apache-2.0
// Measures steps of a sharded model and the memory that they need: FullyShardedDataParallel
// compared with DistributedDataParallel, with Python's fully_shard (FSDP2) on the same torch, and
// with no communication at all.
//
// Two ranks, each pinned to a core of its own, with one compute thread each. A worker process runs
// one setting: warm-up, then timed steps. Workers of all settings take turns over several rounds,
// so that noise of the machine affects all of them.
//
//   blocks: 8 transformer blocks of width 512 (25.2 M parameters), 4 texts of 32 tokens a rank
//   mlp:    784-4096-4096-1024-10 (24.2 M parameters), batch 32 a rank
//
// On a GPU also one rank over NCCL, beside the plain module, eager and captured (fsdp_on_gpu.h).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include <torch/torch.h>

#include <weft/profiling/bench/fsdp_on_gpu.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/transformer_block.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

namespace nn = torch::nn;

constexpr int kWarmUp = 2;
constexpr std::int64_t kWidth = 512, kTokens = 32;

struct Model {
  nn::Sequential net;
  torch::Tensor inputs;
  int steps;
};

Model make(const std::string& name) {
  Model model;
  if (name == "blocks") {
    for (int i = 0; i < 8; ++i) model.net->push_back(weft::bench::Block(kWidth));
    model.net->push_back(nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    model.inputs = torch::randn({4, kTokens, kWidth});
    model.steps = 4;
  } else {
    const std::vector<std::int64_t> widths{784, 4096, 4096, 1024, 10};
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      model.net->push_back(nn::Linear(widths[i], widths[i + 1]));
      model.net->push_back(nn::ReLU());
    }
    model.inputs = torch::randn({32, widths.front()});
    model.steps = 8;
  }
  return model;
}

// A line of /proc/self/status in KiB.
double memory(const std::string& kind) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kind + ":")) return std::atof(line.c_str() + kind.size() + 1);
  }
  std::exit(2);
}

// Runs one rank of one setting. Rank 0 prints the memory in KiB before the model was made, the most
// during the timed steps, and the time of each of these in seconds.
int work(const std::string& setting, const std::string& name) {
  weft::bench::pin_to_core(std::atoi(std::getenv("LOCAL_RANK")));
  at::set_num_threads(1);
  torch::manual_seed(0);
  weft::ProcessGroup group =
      weft::init_process_group({.backend = std::getenv("WEFT_BENCH_BACKEND")});
  const double base = memory("VmRSS");
  Model model = make(name);
  std::optional<weft::DistributedDataParallel<nn::SequentialImpl>> ddp;
  std::optional<weft::FullyShardedDataParallel<nn::SequentialImpl>> sharded;
  if (setting == "ddp") ddp.emplace(model.net, group);
  if (setting == "fsdp") sharded.emplace(model.net, group);
  torch::optim::SGD optimizer(model.net->parameters(),
                              torch::optim::SGDOptions(0.001).momentum(0.9));
  const auto step = [&] {
    optimizer.zero_grad();
    const auto output = sharded ? sharded->forward(model.inputs)
                        : ddp   ? ddp->forward(model.inputs)
                                : model.net->forward(model.inputs);
    output.square().mean().backward();
    optimizer.step();
  };
  for (int i = 0; i < kWarmUp; ++i) step();
  std::ofstream("/proc/self/clear_refs") << 5 << std::flush;  // VmHWM begins anew
  group.barrier().wait();
  std::vector<double> numbers = weft::bench::time_each(model.steps, step);
  numbers.insert(numbers.begin(), {base, memory("VmHWM")});
  if (group.rank() == 0) weft::bench::print_numbers(numbers);
  return 0;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  std::string backend;
  // The setting without communication with which it is compared; "" if it is one itself.
  std::string alone;
  weft::bench::Samples steps = {};
  weft::bench::Samples memory = {};  // in MiB, more than before the model was made
};

// Starts two ranks of a worker and reads rank 0's output.
void run(Setting& setting) {
  const auto output =
      weft::bench::run_workers(setting.command, 2, {{"WEFT_BENCH_BACKEND", setting.backend}});
  std::istringstream stream(output.text);
  double base = 0, most = 0;
  stream >> base >> most;
  setting.memory.add((most - base) / 1024);
  for (double time = 0; stream >> time;) setting.steps.add(time);
  setting.memory.end_round();
  setting.steps.end_round();
}

bool python_can_shard(const char* python) {
  return std::system((std::string(python) +
                      " -c 'from torch.distributed.fsdp import fully_shard' 2>/dev/null")
                         .c_str()) == 0;
}

std::vector<Setting> settings_for(const std::string& model, const weft::bench::Report& report) {
  const std::string self = weft::bench::this_program();
  const auto weft = [&](const char* name, const char* kind, const char* backend,
                        const char* alone) {
    return Setting{name, {self, "--worker", kind, model}, backend, alone};
  };
  std::vector<Setting> settings{weft("weft shm", "fsdp", "shm", "weft alone"),
                                weft("weft gloo", "fsdp", "gloo", "weft alone"),
                                weft("weft ddp shm", "ddp", "shm", "weft alone"),
                                weft("weft alone", "alone", "gloo", "")};
  const char* python = std::getenv("WEFT_BENCH_PYTHON");
  if (python != nullptr && python_can_shard(python)) {
    settings.push_back(
        {"python gloo", {python, FSDP_PYTHON, "fsdp", model}, "gloo", "python alone"});
    settings.push_back({"python alone", {python, FSDP_PYTHON, "alone", model}, "gloo", ""});
  } else if (report.before().empty()) {
    report.note(
        "Python's fully_shard is not measured: WEFT_BENCH_PYTHON names no python whose torch has "
        "it");
  }
  weft::bench::add_before(settings, report);
  return settings;
}

double exposed(const std::vector<Setting>& settings, const Setting& setting, double quantile) {
  const auto alone = std::ranges::find(settings, setting.alone, &Setting::name);
  return setting.steps.quantile(quantile) - alone->steps.quantile(quantile);
}

// Prints the ratios that docs/benchmarks.md has aims for.
void note_ratios(const std::string& model, const std::vector<Setting>& settings,
                 const weft::bench::Report& report) {
  const auto find = [&](const char* name) {
    return std::ranges::find(settings, name, &Setting::name);
  };
  const auto note = [&](const std::string& what, double ratio) {
    std::ostringstream text;
    text.precision(3);
    text << model << " " << what << ": " << ratio;
    report.note(text.str());
  };
  const auto shm = find("weft shm"), python = find("python gloo");
  note("step, weft shm / weft ddp shm",
       shm->steps.quantile(0.5) / find("weft ddp shm")->steps.quantile(0.5));
  if (python == settings.end()) return;
  for (const auto& mine : {shm, find("weft gloo")}) {
    note("exposed communication, " + mine->name + " / python gloo",
         exposed(settings, *mine, 0.5) / exposed(settings, *python, 0.5));
    note("memory, " + mine->name + " / python gloo",
         mine->memory.quantile(0.5) / python->memory.quantile(0.5));
  }
}

void measure(const std::string& model, weft::bench::Report& report) {
  std::vector<Setting> settings = settings_for(model, report);
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) run(setting);
  }
  std::size_t bytes = 0;
  for (const auto& parameter : make(model).net->parameters()) bytes += parameter.nbytes();
  for (const Setting& setting : settings)
    report.add(
        weft::bench::time_row(model + " step", setting.name, bytes, setting.steps, 1e3, "ms"));
  for (const Setting& setting : settings) {
    weft::bench::Row row =
        weft::bench::time_row(model + " memory", setting.name, bytes, setting.memory, 1, "MiB");
    row.metric = "most in a step - before the model";
    report.add(row);
  }
  // Differences are not compared between builds, because they have no spread.
  if (!report.before().empty()) return;
  for (const Setting& setting : settings) {
    if (setting.alone.empty()) continue;
    report.add({model + " exposed communication", setting.name, bytes, "step - step alone", "ms",
                1e3 * exposed(settings, setting, 0.5), 1e3 * exposed(settings, setting, 0.99),
                setting.steps.count()});
  }
  note_ratios(model, settings, report);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], argv[3]);
  weft::bench::Report report("fsdp", argc, argv, /*default_runs=*/3, /*takes_before=*/true);
  for (const std::string model : {"blocks", "mlp"}) {
    if (report.wants(model)) measure(model, report);
  }
  weft::bench::bench_fsdp_on_gpu(report);
  return report.finish();
}
