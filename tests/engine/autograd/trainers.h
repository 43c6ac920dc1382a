// SPDX-License-Identifier: Apache-2.0
// Shared by tests of trainers, each with an agent and a group: the settings they run in, and a
// model that alternates between another worker's layers and averaged layers here.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include <torch/autograd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/module.h>

#include <weft/parallel.h>
#include <weft/tests/engine/autograd/settings.h>
#include <weft/tests/harness/folder.h>

namespace hybrid {

using namespace weft;

struct Layer {
  explicit Layer(at::Tensor value) : Layer(value, at::kCPU) {}
  Layer(at::Tensor value, c10::Device device)
      : weight(value.to(device, false, /*copy=*/true).requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(weight); }
  at::Tensor gradient() { return AutogradContext::current().gradient(weight); }
  at::Tensor weight;
};
struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(const at::Tensor& value)
      : weight(register_parameter("weight", value.clone())) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(weight); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

// Every transport, as threads and as processes; each test has its own number of workers.
inline std::vector<harness::Setting> places() {
  using harness::As;
  return {{As::Threads, "inproc"},
          {As::Threads, "shm"},
          {As::Threads, "tcp"},
          {As::Processes, "shm"},
          {As::Processes, "tcp"}};
}
inline auto place_name = [](const auto& info) {
  return info.param.transport + name(info.param.as);
};

using Train = std::function<void(rpc::Agent&, ProcessGroup&)>;
// Runs workers, of which the first `trainers` have a group and run the body. The group's backend is
// `backend`, or else the place's transport (gloo for inproc). `device_of` gives each trainer's
// device.
inline void train(harness::Setting place, int workers, int trainers, const Train& body,
                  const std::string& backend = "",
                  const std::function<c10::Device(int rank)>& device_of = {}) {
  const harness::Folder folder;  // where processes meet
  const auto in_process = c10::make_intrusive<c10d::HashStore>();
  place.workers = workers;
  harness::run_workers(place, [&](rpc::Agent& agent) {
    const int rank = agent.self().rank;
    if (rank >= trainers) return;
    ProcessGroupOptions options{
        .backend = place.transport == "inproc" ? "gloo" : place.transport,
        .init_method = "file://" + (std::filesystem::path(folder.path()) / "trainers").string(),
        .rank = rank,
        .world_size = trainers,
        .group_name = "trainers",
        .timeout = std::chrono::minutes(1),
        .device = device_of ? device_of(rank) : c10::Device(at::kCPU)};
    if (!backend.empty()) options.backend = backend;
    if (place.as == harness::As::Threads) options.store = in_process;
    ProcessGroup group = init_process_group(options);
    body(agent, group);
    group.barrier().wait();
  });
}

// The first and the third layer are on another worker's CPU. The second and the fourth are two
// models here, on the given device. Expects the gradients of all four layers in one process,
// averaged for the second and the fourth.
inline void alternate_layers(rpc::Agent& agent, ProcessGroup& group, int remote,
                             c10::Device device) {
  const auto numbers = [](std::int64_t rows, std::int64_t columns) {
    return at::linspace(-1, 1, rows * columns, at::kDouble).view({rows, columns});
  };
  const std::vector<at::Tensor> values = {numbers(4, 5), numbers(5, 3), numbers(3, 6),
                                          numbers(6, 2)};
  const auto first = agent.remote<Layer>(remote, values[0]),
             third = agent.remote<Layer>(remote, values[2]);
  Dense second(values[1].to(device)), fourth(values[3].to(device));
  DistributedDataParallel averaged_second(second, group), averaged_fourth(fourth, group);
  for (int round = 0; round < 3; ++round) {
    const at::Tensor x = numbers(3, 4) * (1 + group.rank()) + round;
    std::vector<at::Tensor> local;
    for (const at::Tensor& value : values) local.push_back(value.clone().requires_grad_());
    at::Tensor y = x;
    for (const at::Tensor& weight : local) y = y.matmul(weight).tanh();
    auto expected = torch::autograd::grad({y.sum()}, local);
    for (const std::size_t averaged : {1, 3}) {
      const at::Tensor sum = expected[averaged].to(device);
      group.all_reduce(sum).wait();
      expected[averaged] = (sum / group.size()).cpu();
    }

    AutogradContext context(agent);
    y = averaged_second(first.sync<&Layer::forward>(x).tanh().to(device)).tanh();
    y = averaged_fourth(third.sync<&Layer::forward>(y.cpu()).tanh().to(device)).tanh();
    context.backward({y.sum()});
    const at::Tensor found[] = {
        first.sync<&Layer::gradient>(), context.gradient(second->weight).cpu(),
        third.sync<&Layer::gradient>(), context.gradient(fourth->weight).cpu()};
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-10, 1e-10))
          << "layer " << i << ", round " << round;
      EXPECT_GT(at::count_nonzero(found[i]).item<std::int64_t>(), 0) << "layer " << i;
    }
  }
}

}  // namespace hybrid
