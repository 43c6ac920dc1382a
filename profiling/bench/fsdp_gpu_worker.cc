// SPDX-License-Identifier: Apache-2.0
// The worker of fsdp_bench on a GPU, a program of its own because libtorch's CUDA half takes memory
// that the other cases measure. One rank over NCCL. Prints a line for each peer: its name, a colon,
// and the seconds of steps. The peers are measured in turns.
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <weft/profiling/bench/transformer_block.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace {

namespace nn = torch::nn;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr std::int64_t kWidth = 2048, kTokens = 1024;
constexpr int kBlocks = 8;
constexpr int kWarmUp = 11;
constexpr int kTimes = 8;  // measurements of each peer
constexpr int kSteps = 5;  // steps between two waits for the device

nn::Sequential make_net() {
  torch::manual_seed(0);
  nn::Sequential net;
  for (int i = 0; i < kBlocks; ++i) net->push_back(weft::bench::Block(kWidth));
  net->to(kGpu, torch::kBFloat16);
  return net;
}

// A model with its optimizer, sharded over the group or plain.
class Training {
 public:
  explicit Training(const weft::ProcessGroup* group) {
    if (group != nullptr) sharded_.emplace(net_, *group);
    optimizer_.emplace(net_->parameters(), torch::optim::SGDOptions(0.001).momentum(0.9));
    for (int i = 0; i < kWarmUp; ++i) step();
    torch::cuda::synchronize();
  }
  void step() {
    optimizer_->zero_grad();
    const auto output = sharded_ ? sharded_->forward(x_) : net_->forward(x_);
    output.square().mean().backward();
    optimizer_->step();
  }

 private:
  nn::Sequential net_ = make_net();
  torch::Tensor x_ =
      torch::randn({4, kTokens, kWidth}, at::TensorOptions(kGpu).dtype(torch::kBFloat16));
  std::optional<weft::FullyShardedDataParallel<nn::SequentialImpl>> sharded_;
  std::optional<weft::FusedSGD> optimizer_;
};

struct Peer {
  std::string name;
  std::function<void()> step;
  std::vector<double> times = {};

  void measure() {
    const double start = weft::bench::now();
    for (int i = 0; i < kSteps; ++i) step();
    torch::cuda::synchronize();
    times.push_back((weft::bench::now() - start) / kSteps);
  }
};

}  // namespace

int main() {
  // Capturing needs a stream other than the default one.
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const c10::cuda::CUDAStreamGuard current(stream);
  const weft::ProcessGroup group =
      weft::init_process_group({.backend = "cpu:gloo,cuda:nccl", .device = kGpu});
  Training plain(nullptr), sharded(&group);
  at::cuda::CUDAGraph of_plain, of_sharded;
  for (auto [graph, training] : {std::pair(&of_plain, &plain), std::pair(&of_sharded, &sharded)}) {
    graph->capture_begin();
    training->step();
    graph->capture_end();
  }
  std::vector<Peer> peers{{"plain", [&] { plain.step(); }},
                          {"weft nccl", [&] { sharded.step(); }},
                          {"plain captured", [&] { of_plain.replay(); }},
                          {"weft nccl captured", [&] { of_sharded.replay(); }}};
  for (int time = 0; time < kTimes; ++time) {
    for (Peer& peer : peers) peer.measure();
  }
  for (const Peer& peer : peers) {
    std::printf("%s:", peer.name.c_str());
    for (const double time : peer.times) std::printf(" %.9f", time);
    std::printf("\n");
  }
  return 0;
}
