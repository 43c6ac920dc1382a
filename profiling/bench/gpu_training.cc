#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <weft/profiling/bench/gpu_training.h>
#include <weft/profiling/bench/timelines.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace weft::bench {

namespace {

constexpr std::int64_t kWidths[] = {1024, 2048, 2048, 2048, 1024};
constexpr std::int64_t kBatch = 128;
constexpr int kWarmUp = 11;  // the buckets are built anew behind the first step, and libraries choose their kernels
constexpr int kRounds = 3;   // of each way in turn
constexpr int kTimes = 10;   // in a round
constexpr int kSteps = 10;   // between two waits for the device

torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < std::size(kWidths); ++i) {
    net->push_back(torch::nn::Linear(kWidths[i], kWidths[i + 1]));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

void print(const char* what, const std::vector<double>& times) {
  std::printf("%s", what);
  for (const double time : times) std::printf(" %.9f", time);
  std::printf("\n");
  std::fflush(stdout);
}

using Measured = std::map<std::string, Samples>;  // by what was measured

void train(const std::string& how, Measured& samples) {
  std::istringstream lines(run_workers({this_program(), "--worker", how}, 1).text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    for (double time = 0; words >> time;) samples[what].add(time);
  }
}

}  // namespace

int train_on_gpu(const std::string& how) {
  torch::manual_seed(0);
  const c10::Device gpu(c10::kCUDA, 0);
  // Capturing needs a stream that is not the default one.
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const c10::cuda::CUDAStreamGuard current(stream);
  ProcessGroup group = init_process_group({.backend = "nccl", .device = gpu});
  auto net = make_net();
  net->to(gpu);
  DistributedDataParallel<torch::nn::SequentialImpl> ddp(net, group);
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  const auto inputs = torch::randn({kBatch, kWidths[0]}, gpu);
  const auto labels = torch::randint(kWidths[std::size(kWidths) - 1], {kBatch}, gpu);
  const auto step = [&] {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(ddp.forward(inputs), labels).backward();
    optimizer.step();
  };
  for (int i = 0; i < kWarmUp; ++i) step();
  torch::cuda::synchronize();
  if (how == "traced") return 0;

  std::optional<at::cuda::CUDAGraph> graph;
  if (how == "captured") {
    graph.emplace();
    graph->capture_begin();
    step();
    graph->capture_end();
  }
  std::vector<double> host, whole;
  for (int time = 0; time < kTimes; ++time) {
    const double start = now();
    for (int i = 0; i < kSteps; ++i) graph ? graph->replay() : step();
    host.push_back((now() - start) / kSteps);
    torch::cuda::synchronize();
    whole.push_back((now() - start) / kSteps);
  }
  print("host", host);
  print("step", whole);
  return 0;
}

void bench_captured_step(Report& report) {
  const std::string name = "training step";
  if (!report.wants(name)) return;
  Measured captured, eager;
  for (int round = 0; round < kRounds; ++round) {
    train("captured", captured);
    train("eager", eager);
  }
  for (const auto& [what, metric] : {std::pair{"host", "host time"}, std::pair{"step", "time"}}) {
    for (auto& [peer, samples] : {std::pair<std::string, Samples&>{"captured", captured[what]}, {"eager", eager[what]}}) {
      Row row = time_row(name, peer, 0, samples, 1e6, "us");
      row.metric = metric;
      report.add(row);
    }
  }
}

void bench_exposed(Report& report) {
  const std::string name = "exposed communication of DDP, two ranks";
  if (!report.wants(name)) return;
  const std::string folder = new_folder();
  const std::string file = folder + "/run.json";
  // NCCL takes two ranks on one GPU for a mistake, unless each believes in a host of its own; then they have a network
  // only.
  const std::string self = this_program();
  run_workers({"sh", "-c", "NCCL_HOSTID=rank$RANK LOCAL_RANK=0 exec '" + self + "' --worker traced"}, 2,
              {{"WEFT_TIMELINE", file},
               {"NCCL_SOCKET_IFNAME", "lo"},
               {"NCCL_NET", "Socket"},
               {"NCCL_IB_DISABLE", "1"},
               {"NCCL_NVLS_ENABLE", "0"},
               {"NCCL_MAX_NCHANNELS", "1"},
               {"NCCL_ALGO", "Ring"},
               {"NCCL_PROTO", "Simple"},
               {"NCCL_RAS_ENABLE", "0"},
               {"CUDA_MODULE_LOADING", "EAGER"}});
  Samples share;
  share.add(exposed_in(file));
  report.add({name, "weft-timeline summary", 0, "share of the step", "%", share.quantile(0.5), share.quantile(0.5),
              share.count()});
  std::filesystem::remove_all(folder);
}

}  // namespace weft::bench
