// SPDX-License-Identifier: Apache-2.0
// The names that the documents' blocks of C++ use and do not declare (blocks.py). Nothing is
// linked.
#pragma once

#include <atomic>
#include <functional>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/script.h>
#include <torch/torch.h>

#include <weft/fully_shard.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/stream/stream_connection.h>
#include <weft/weft.h>

namespace docs::autograd {
using namespace weft;
extern rpc::Agent& agent;
extern at::Tensor x;
extern std::vector<RRef<at::Tensor>> parameters;
extern DistributedOptimizer<torch::optim::SGD>& optimizer;
at::Tensor forward(at::Tensor x, std::vector<RRef<at::Tensor>> parameters);
}  // namespace docs::autograd

namespace docs::data_parallel {
extern torch::nn::Sequential model;
extern weft::ProcessGroup& group;
extern weft::DistributedDataParallel<torch::nn::SequentialImpl>& ddp;
extern weft::ZeroRedundancyOptimizer<torch::optim::Adam>& zero;
extern torch::optim::SGD optimizer;
extern torch::optim::AdamOptions options;
extern std::vector<std::pair<at::Tensor, at::Tensor>> batches;
extern at::Tensor loss;
extern int epoch, epochs;
void train(int epoch);
void train(weft::DistributedDataParallel<torch::nn::SequentialImpl>& ddp,
           weft::ZeroRedundancyOptimizer<torch::optim::Adam>& optimizer, weft::ProcessGroup& group,
           int& epoch);
}  // namespace docs::data_parallel

namespace docs::large_models {
extern torch::nn::Sequential model;
extern weft::ProcessGroup& group;
extern at::Tensor inputs, tensor;
at::Tensor loss_of(at::Tensor outputs);
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
TORCH_MODULE(Block);
extern std::vector<Block> blocks;
extern at::Tensor x;
struct NetImpl : torch::nn::Module {};
TORCH_MODULE(Net);
extern Net net;
struct RmsNorm : torch::nn::Module {
  at::Tensor weight;
};
}  // namespace docs::large_models

namespace docs::rpc {
namespace rpc = weft::rpc;
extern rpc::Agent& agent;
extern at::Tensor x, target;
at::Tensor f(at::Tensor x);
class Counter;
void reset(Counter& counter);
}  // namespace docs::rpc

namespace weft::transport::copycat {
struct CopycatStream final : ByteStream {
  CopycatStream(const std::string& address, Deadline deadline);
  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override;
  std::optional<Error> end() const noexcept override;
  void finish_writing() noexcept override;
};
}  // namespace weft::transport::copycat
