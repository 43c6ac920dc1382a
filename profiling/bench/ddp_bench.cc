// How much of a data-parallel step is communication that compute does not hide, and how long a job takes to its first step:
// Weft's DistributedDataParallel against Python's on the same torch, and both against no communication at all.
//
// Two ranks, each pinned to a core of its own, one compute thread each. A worker process runs one setting: start-up,
// warm-up, then timed steps. Workers of all settings take turns, several rounds, so that a noisy machine is noisy for all.
//
//   small: MLP 784-512-512-10, batch 64 a rank       large: 784-4096-4096-1024-10 (about 24 M parameters), batch 32 a rank
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/torch.h>

#include <weft/engine/launch/process.h>
#include <weft/profiling/bench/report.h>
#include <weft/weft.h>

namespace {

using Clock = std::chrono::steady_clock;

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

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

torch::nn::Sequential make_net(const Model& model) {
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < model.widths.size(); ++i) {
    net->push_back(torch::nn::Linear(model.widths[i], model.widths[i + 1]));
    if (i + 2 < model.widths.size()) net->push_back(torch::nn::ReLU());
  }
  return net;
}

// One rank of one setting. Rank 0 prints the time of the first step's end and of each timed step, in seconds.
int work(const std::string& setting, const Model& model) {
  const int local = std::atoi(std::getenv("LOCAL_RANK"));
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(local), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
  at::set_num_threads(1);
  torch::manual_seed(0);

  weft::ProcessGroup group = weft::init_process_group({.backend = std::getenv("WEFT_BENCH_BACKEND")});
  auto net = make_net(model);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  std::optional<weft::DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
  if (setting == "weft") ddp.emplace(net, group);
  const auto inputs = torch::randn({model.batch, model.widths.front()});
  const auto labels = torch::randint(10, {model.batch});
  const auto step = [&] {
    optimizer.zero_grad();
    const auto output = ddp ? ddp->forward(inputs) : net->forward(inputs);
    torch::nn::functional::cross_entropy(output, labels).backward();
    optimizer.step();
  };
  step();
  const double first = now();
  for (int i = 0; i < model.warm_up; ++i) step();
  group.barrier().wait();
  std::vector<double> times;
  for (int i = 0; i < model.steps; ++i) {
    const double start = now();
    step();
    times.push_back(now() - start);
  }
  if (group.rank() == 0) {
    std::printf("%.6f", first);
    for (const double time : times) std::printf(" %.9f", time);
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

struct Outcome {
  double start_up = 0;  // launch to the end of the first step
  std::vector<double> steps;
};

// Starts two ranks of a worker and reads what rank 0 prints.
Outcome run_workers(const std::vector<std::string>& command, const std::string& backend) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(2);
  const int port = weft::launch::free_port();
  const double launched = now();
  weft::launch::Children children;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t process = fork();
    if (process != 0) {
      children.add(process);
      continue;
    }
    dup2(ends[1], STDOUT_FILENO);
    const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    set("WORLD_SIZE", "2");
    set("LOCAL_WORLD_SIZE", "2");
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port));
    set("OMP_NUM_THREADS", "1");
    set("WEFT_BENCH_BACKEND", backend);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    std::_Exit(127);
  }
  close(ends[1]);
  std::string text;
  char buffer[65536];
  for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(count));
  close(ends[0]);
  while (!children.running().empty()) {
    const auto ended = children.wait(std::chrono::minutes(5));
    if (ended.status != 0) {
      std::fprintf(stderr, "ddp_bench: a worker ended with %s\n", weft::launch::describe_status(ended.status).c_str());
      std::exit(2);
    }
  }
  Outcome outcome;
  std::istringstream stream(text);
  double first = 0;
  stream >> first;
  outcome.start_up = first - launched;
  for (double time = 0; stream >> time;) outcome.steps.push_back(time);
  return outcome;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  std::string backend;
  weft::bench::Samples steps;
  weft::bench::Samples start_ups;
};

void measure(const Model& model, weft::bench::Report& report, const std::string& self) {
  const char* python = std::getenv("WEFT_BENCH_PYTHON");
  std::vector<Setting> settings;
  settings.push_back({"weft", {self, "--worker", "weft", model.name}, "gloo", {}, {}});
  settings.push_back({"alone", {self, "--worker", "alone", model.name}, "gloo", {}, {}});
  if (python != nullptr) {
    const std::string script = DDP_PYTHON;
    settings.push_back({"python", {python, script, "ddp", model.name}, "gloo", {}, {}});
    settings.push_back({"python alone", {python, script, "alone", model.name}, "gloo", {}, {}});
  } else {
    report.note("Python's DistributedDataParallel is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      const Outcome outcome = run_workers(setting.command, setting.backend);
      setting.start_ups.add(outcome.start_up);
      for (const double time : outcome.steps) setting.steps.add(time);
    }
  }
  const std::string name = model.name;
  std::size_t bytes = 0;
  for (const auto& parameter : make_net(model)->parameters()) bytes += parameter.nbytes();
  for (const Setting& setting : settings)
    report.add(weft::bench::time_row(name + " step", setting.name, bytes, setting.steps, 1e3, "ms"));
  for (std::size_t i = 0; i + 1 < settings.size(); i += 2) {
    weft::bench::Row row{name + " exposed communication", settings[i].name, bytes, "step - step alone", "ms", 0, 0,
                         settings[i].steps.count()};
    row.p50 = 1e3 * (settings[i].steps.quantile(0.5) - settings[i + 1].steps.quantile(0.5));
    row.p99 = 1e3 * (settings[i].steps.quantile(0.99) - settings[i + 1].steps.quantile(0.99));
    report.add(row);
  }
  for (std::size_t i = 0; i < settings.size(); i += 2) {
    report.add(
        weft::bench::time_row(name + " launch to first step", settings[i].name, bytes, settings[i].start_ups, 1, "s"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], model_named(argv[3]));
  weft::bench::Report report("ddp", argc, argv, /*default_runs=*/5);
  char self[4096] = "";
  if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 2;
  for (const Model& model : kModels) {
    if (report.wants(model.name)) measure(model, report, self);
  }
  return report.finish();
}
