// SPDX-License-Identifier: Apache-2.0
// Measures save_async() and load() of a model with Adam's state on two ranks: how long training
// stands still, how a training step slows down while a thread writes, and the rates of writing and
// loading. Peers in the same run: a memcpy of the bytes that a rank copies, dd on the same disk
// without the page cache, and PyTorch's torch.distributed.checkpoint with async_save.
//
// All ranks have the whole model, as DistributedDataParallel keeps it, and each saves its half; in
// the case "sharded" each rank has half of the model, and PyTorch's is under fully_shard. The first
// save of a job makes memory for the copies, which later ones use again. A worker process measures
// one round; workers and dd take turns. Files are on the disk (fsync) when a save has ended; no
// peer removes an older checkpoint in the measured time. Before a load the page cache is dropped
// for the files.
//
//   --mib N      size of parameters and state, by default 1020 MiB
//   --folder DIR on the disk to be measured, by default below the current folder
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>

#include <fcntl.h>
#include <unistd.h>

#include <torch/torch.h>

#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

using weft::bench::now;
using weft::bench::Samples;

constexpr std::int64_t kWidth = 1024;

// As many layers as fill `mib` MiB with parameters and two moments of each.
torch::nn::Sequential make_net(std::int64_t mib) {
  torch::nn::Sequential net;
  const std::int64_t layers = std::max<std::int64_t>(1, mib / 12);
  for (std::int64_t i = 0; i < layers; ++i)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  return net;
}

// Makes the system forget the contents of the folder's files, which are on the disk.
void drop_cached(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = open(entry.path().c_str(), O_RDONLY);
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

void print(const char* what, double seconds) { std::printf("%s %.9f\n", what, seconds); }

// A training step of a small model of its own, some milliseconds long.
class Training {
 public:
  double step() {
    const double start = now();
    optimizer_.zero_grad();
    net_->forward(inputs_).square().mean().backward();
    optimizer_.step();
    return now() - start;
  }

 private:
  torch::nn::Sequential net_ = make_net(24);
  torch::optim::SGD optimizer_{net_->parameters(), 0.01};
  torch::Tensor inputs_ = torch::randn({32, kWidth});
};

void copy_resident(std::size_t bytes) {
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes, 2);
  const double start = now();
  std::memcpy(to.data(), from.data(), bytes);
  print("memcpy", now() - start);
}

// One rank of a round. Rank 0 prints names and times in seconds.
int work(const std::string& setting, std::int64_t mib, const std::string& folder) {
  at::set_num_threads(1);
  torch::manual_seed(0);
  weft::ProcessGroup group = weft::init_process_group({.backend = "shm"});
  if (group.rank() != 0) std::freopen("/dev/null", "w", stdout);
  auto net = make_net(mib);
  std::optional<weft::FullyShardedDataParallel<torch::nn::SequentialImpl>> sharded;
  if (setting == "sharded") sharded.emplace(net, group);
  torch::optim::Adam optimizer(net->parameters());
  std::size_t bytes = 0;
  for (auto& parameter : net->parameters()) {
    parameter.mutable_grad() = torch::ones_like(parameter);
    bytes += 3 * parameter.nbytes();
  }
  optimizer.step();
  optimizer.zero_grad();  // frees the gradients
  const std::vector<weft::checkpoint::Part> parts = {{"model", net}, {"optimizer", optimizer}};
  Training training;
  for (int i = 0; i < 20; ++i) training.step();
  for (int i = 0; i < 20; ++i) print("step", training.step());
  group.barrier().wait();
  copy_resident(setting == "sharded" ? bytes : bytes / 2);
  weft::checkpoint::Saving saving;
  for (int i = 0; i < 3; ++i) {
    group.barrier().wait();
    const double start = now();
    saving = weft::checkpoint::save_async(folder, group, parts, {.keep = 3});
    print(i == 0 ? "first stand-still" : "stand-still", now() - start);
    if (i < 2) {  // nothing else runs
      saving.wait();
      if (i == 1) print("write", now() - start);
    }
    while (!saving.query()) print("step while writing", training.step());
    saving.wait();
  }
  if (group.rank() == 0) drop_cached(folder);
  group.barrier().wait();
  const double start = now();
  weft::checkpoint::load(folder, group, parts);
  group.barrier().wait();
  print("load", now() - start);
  return 0;
}

std::map<std::string, std::vector<double>> times_in(const std::string& text) {
  std::map<std::string, std::vector<double>> times;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.rfind(' ');
    times[line.substr(0, space)].push_back(std::atof(line.c_str() + space));
  }
  return times;
}

// Runs dd and returns its seconds.
double dd(const std::string& arguments) {
  const double start = now();
  if (std::system(("dd bs=16M " + arguments + " 2> /dev/null").c_str()) != 0) {
    std::fprintf(stderr, "checkpoint_bench: dd %s fails\n", arguments.c_str());
    std::exit(2);
  }
  return now() - start;
}

struct Bench {
  std::int64_t mib = 1020;
  std::string folder = ".";
  std::string self = weft::bench::this_program();
  // By measure and peer.
  std::map<std::string, std::vector<std::pair<std::string, Samples>>> samples = {};

  Samples& at(const std::string& measure, const std::string& peer) {
    auto& all = samples[measure];
    const auto found = std::ranges::find(all, peer, &std::pair<std::string, Samples>::first);
    if (found != all.end()) return found->second;
    return all.emplace_back(peer, Samples()).second;
  }

  void run(const std::string& peer, std::vector<std::string> command) {
    const std::string place = folder + "/weft-checkpoint-bench";
    std::filesystem::remove_all(place);
    std::filesystem::create_directory(place);
    command.push_back(std::to_string(mib));
    command.push_back(place + "/run");
    for (const auto& [name, times] : times_in(weft::bench::run_workers(command, 2).text)) {
      const bool is_copy = name == "memcpy";
      Samples& to = at(is_copy ? "stand-still" : name, is_copy ? name : peer);
      for (const double time : times) to.add(time);
      to.end_round();
    }
    std::filesystem::remove_all(place);
  }

  void run_dd() {
    const std::string file = folder + "/weft-checkpoint-bench.dd";
    const std::string count = " count=" + std::to_string((mib + 15) / 16);
    at("write", "dd").add(dd("if=/dev/zero oflag=direct conv=fsync of='" + file + "'" + count));
    at("load", "dd").add(dd("of=/dev/null iflag=direct if='" + file + "'"));
    std::filesystem::remove(file);
  }
};

void measure(const std::string& setting, Bench& bench, weft::bench::Report& report) {
  bench.samples.clear();
  bench.at("stand-still", "weft");  // the first row, with which the others are compared
  const char* const python = std::getenv("WEFT_BENCH_PYTHON");
  if (python == nullptr)
    report.note(
        "PyTorch's checkpoints are not measured: WEFT_BENCH_PYTHON names no python with torch");
  for (int round = 0; round < report.runs(); ++round) {
    bench.run("weft", {bench.self, "--worker", setting});
    bench.run_dd();
    if (python != nullptr) bench.run("torch dcp", {python, CHECKPOINT_PYTHON, setting});
  }
  const auto bytes = static_cast<std::size_t>(bench.mib / 12 * 3) * kWidth * kWidth * 4;
  for (const std::string name :
       {"first stand-still", "stand-still", "step", "step while writing"}) {
    for (const auto& [peer, samples] : bench.samples[name])
      report.add(weft::bench::time_row(setting + " " + name, peer, bytes, samples, 1e3, "ms"));
  }
  for (const auto& [peer, samples] : bench.samples["step while writing"]) {
    const double ratio = samples.quantile(0.5) / bench.at("step", peer).quantile(0.5);
    report.add({setting + " step while writing / step", peer, bytes, "ratio", "x", ratio, ratio,
                samples.count()});
  }
  for (const std::string name : {"write", "load"}) {
    for (const auto& [peer, samples] : bench.samples[name])
      report.add(weft::bench::bandwidth_row(setting + " " + name, peer, bytes, samples));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--worker") == 0)
    return work(argv[2], std::atoll(argv[3]), argv[4]);
  Bench bench;
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    if (i + 1 < argc && std::strcmp(argv[i], "--mib") == 0) {
      bench.mib = std::atoll(argv[++i]);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--folder") == 0) {
      bench.folder = argv[++i];
    } else {
      if (std::strcmp(argv[i], "--help") == 0)
        std::printf("also: [--mib N (of parameters and state)] [--folder DIR (on the disk)]\n");
      rest.push_back(argv[i]);
    }
  }
  if (bench.mib < 12) {
    std::fprintf(stderr, "checkpoint_bench: --mib needs at least 12\n");
    return 2;
  }
  bench.mib = bench.mib / 12 * 12;
  weft::bench::Report report("checkpoint", static_cast<int>(rest.size()), rest.data(),
                             /*default_runs=*/3);
  for (const std::string setting : {"plain", "sharded"}) {
    if (report.wants(setting)) measure(setting, bench, report);
  }
  return report.finish();
}
