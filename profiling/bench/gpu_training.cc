// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
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

const c10::Device kGpu(c10::kCUDA, 0);
constexpr std::int64_t kWidths[] = {1024, 2048, 2048, 2048, 1024};
constexpr std::int64_t kBatch = 128;
// The buckets are rebuilt after the first step, and libraries choose their kernels.
constexpr int kWarmUp = 11;
constexpr int kRounds = 2;  // one process for each round
constexpr int kTimes = 15;  // measurements in a round, of each kind in turn
constexpr int kSteps = 10;  // steps between two waits for the device

torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < std::size(kWidths); ++i) {
    net->push_back(torch::nn::Linear(kWidths[i], kWidths[i + 1]));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

void print(const std::string& what, const std::vector<double>& times) {
  std::printf("%s", what.c_str());
  for (const double time : times) std::printf(" %.9f", time);
  std::printf("\n");
  std::fflush(stdout);
}

// A network with DistributedDataParallel on one rank, and its optimizer.
class Training {
 public:
  explicit Training(const ProcessGroup& group)
      : net_(on_gpu(make_net())),
        ddp_(net_, group),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)) {
    for (int i = 0; i < kWarmUp; ++i) step();
    torch::cuda::synchronize();
  }

  void step() {
    optimizer_.zero_grad();
    torch::nn::functional::cross_entropy(ddp_.forward(inputs_), labels_).backward();
    optimizer_.step();
  }

 private:
  static torch::nn::Sequential on_gpu(torch::nn::Sequential net) {
    net->to(kGpu);
    return net;
  }

  torch::nn::Sequential net_;
  DistributedDataParallel<torch::nn::SequentialImpl> ddp_;
  FusedSGD optimizer_;
  at::Tensor inputs_ = torch::randn({kBatch, kWidths[0]}, kGpu);
  at::Tensor labels_ = torch::randint(kWidths[std::size(kWidths) - 1], {kBatch},
                                      at::TensorOptions(kGpu).dtype(at::kLong));
};

// The seconds of a step: until the host has enqueued it, and until it has ended.
struct Times {
  std::vector<double> host, whole;
  void add(const std::function<void()>& step) {
    const double start = now();
    for (int i = 0; i < kSteps; ++i) step();
    host.push_back((now() - start) / kSteps);
    torch::cuda::synchronize();
    whole.push_back((now() - start) / kSteps);
  }
};

}  // namespace

int train_on_gpu(const std::string& how) {
  torch::manual_seed(0);
  // Capturing needs a stream other than the default one.
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const c10::cuda::CUDAStreamGuard current(stream);
  ProcessGroup group = init_process_group({.backend = "nccl", .device = kGpu});
  Training eager(group);
  if (how == "traced") return 0;

  Training captured(group);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  captured.step();
  graph.capture_end();
  Times of_eager, of_captured;
  for (int time = 0; time < kTimes; ++time) {
    of_eager.add([&] { eager.step(); });
    of_captured.add([&] { graph.replay(); });
  }
  print("eager host", of_eager.host);
  print("eager step", of_eager.whole);
  print("captured host", of_captured.host);
  print("captured step", of_captured.whole);
  return 0;
}

void bench_captured_step(Report& report) {
  const std::string name = "training step";
  if (!report.wants(name)) return;
  std::map<std::pair<std::string, std::string>, Samples> samples;
  for (int round = 0; round < kRounds; ++round) {
    std::istringstream lines(run_workers({this_program(), "--worker", "measured"}, 1).text);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string way, what;
      words >> way >> what;
      for (double time = 0; words >> time;) samples[{what, way}].add(time);
    }
  }
  for (const auto& [what, metric] : {std::pair{"host", "host time"}, std::pair{"step", "time"}}) {
    for (const char* const way : {"captured", "eager"}) {
      Row row = time_row(name, way, 0, samples[{what, way}], 1e6, "us");
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
  // NCCL rejects two ranks on one GPU, unless each believes that it is on a host of its own; then
  // they can use only the network.
  const std::string self = this_program();
  run_workers(
      {"sh", "-c", "NCCL_HOSTID=rank$RANK LOCAL_RANK=0 exec '" + self + "' --worker traced"}, 2,
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
  report.add({name, "weft-timeline summary", 0, "share of the step", "%", share.quantile(0.5),
              share.quantile(0.5), share.count()});
  std::filesystem::remove_all(folder);
}

}  // namespace weft::bench
