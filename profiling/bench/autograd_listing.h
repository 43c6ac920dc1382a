// The iterations that autograd_bench measures, as worker 0 of two runs them.
#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

namespace weft::bench {

inline at::Tensor random_tensor() { return torch::rand({3, 3}, at::TensorOptions().requires_grad(true)); }

using Optimizer = DistributedOptimizer<torch::optim::SGD>;
inline const torch::optim::SGDOptions kSgd(0.05);

// What is kept from one iteration to the next.
struct Kept {
  explicit Kept(rpc::Agent& agent)
      : first(agent.remote<&random_tensor>(1)), second(agent.remote<&random_tensor>(1)), optimizer({first, second}, kSgd) {}
  RRef<at::Tensor> first, second;
  Optimizer optimizer;
};

// The overview's own, all made anew.
inline void listing(rpc::Agent& agent) {
  AutogradContext context(agent);
  const auto first = agent.remote<&random_tensor>(1), second = agent.remote<&random_tensor>(1);
  const auto a = first.fetch(), b = second.fetch();
  context.backward({(a.get() + b.get()).sum()});
  Optimizer({first, second}, kSgd).step(context);
}

// The same, but nobody waits for the optimizer to be made: the step is queued behind that.
inline void listing_made_behind(rpc::Agent& agent) {
  AutogradContext context(agent);
  const auto first = agent.remote<&random_tensor>(1), second = agent.remote<&random_tensor>(1);
  const auto a = first.fetch(), b = second.fetch();
  context.backward({(a.get() + b.get()).sum()});
  Optimizer({first, second}, kSgd, {.wait_until_made = false}).step(context);
}

inline void kept(rpc::Agent& agent, const Kept& with, BackwardMode mode) {
  AutogradContext context(agent);
  const auto a = with.first.fetch(), b = with.second.fetch();
  context.backward({(a.get() + b.get()).sum()}, {.mode = mode});
  with.optimizer.step(context);
}

// The step is queued behind the pass.
inline void kept_queued(rpc::Agent& agent, const Kept& with) {
  AutogradContext context(agent);
  const auto a = with.first.fetch(), b = with.second.fetch();
  const auto pass = context.backward_async({(a.get() + b.get()).sum()});
  with.optimizer.step_async(context).get();
}

constexpr std::int64_t kWidth = 512;  // of a stage
constexpr std::int64_t kBatch = 64;   // of a micro-batch

inline torch::nn::Sequential make_stage() {
  return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(), torch::nn::Linear(kWidth, kWidth),
                               torch::nn::Tanh());
}
struct LastStage {
  at::Tensor loss(at::Tensor x) { return net->forward(x).sum(); }
  torch::nn::Sequential net = make_stage();
};

// A model in two stages, the first of them here: micro-batch after micro-batch, then one backward.
struct TwoStages {
  explicit TwoStages(rpc::Agent& agent) : last(agent.remote<LastStage>(1)) {}
  torch::nn::Sequential first = make_stage();
  RRef<LastStage> last;
  at::Tensor input = torch::rand({kBatch, kWidth});
};
constexpr int kStagedBatches = 8;
inline void two_stages(rpc::Agent& agent, TwoStages& model) {
  AutogradContext context(agent);
  std::vector<Future<at::Tensor>> outs;
  for (int i = 0; i < kStagedBatches; ++i) {
    outs.push_back(model.last.async<&LastStage::loss>(model.first->forward(model.input)));
  }
  context.backward({at::stack(when_all(std::move(outs)).get()).sum()});
}

// Two workers of this process, joined by links whose speed is set and whose messages and bytes are counted. In a process of
// its own: autograd_bench --linked WHAT. Prints numbers, as the cases of autograd_bench.cc read them.
int work_linked(const std::string& what);

}  // namespace weft::bench
