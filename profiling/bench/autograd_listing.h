// SPDX-License-Identifier: Apache-2.0
// The iterations that autograd_bench measures. Worker 0 of two runs them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

namespace weft::bench {

inline at::Tensor random_tensor() {
  return torch::rand({3, 3}, at::TensorOptions().requires_grad(true));
}

using Optimizer = DistributedOptimizer<torch::optim::SGD>;
inline const torch::optim::SGDOptions kSgd(0.05);

// Tensors and optimizer that are kept from one iteration to the next.
struct Kept {
  explicit Kept(rpc::Agent& agent)
      : first(agent.remote<&random_tensor>(1)),
        second(agent.remote<&random_tensor>(1)),
        optimizer({first, second}, kSgd) {}
  RRef<at::Tensor> first, second;
  Optimizer optimizer;
};

// The listing of the overview: two tensors of the other worker, their sum here, backward, a step.
// In its own order, which Python's peer runs too, each line waits for its result; the variants
// leave out waits that are not needed.
struct Iteration {
  const char* name;
  // Keeps tensors and optimizer from one iteration to the next; otherwise makes all anew.
  bool keeps = false;
  // Fetches both tensors at once, instead of the second after the first.
  bool fetches_together = false;
  // Sends the step without waiting for the pass (kept), or for the optimizer to be made.
  bool queues = false;
  BackwardMode mode = BackwardMode::Fast;
};
constexpr Iteration kIterations[] = {{"listing"},
                                     {"listing, fetched together", false, true},
                                     {"listing, made behind", false, true, true},
                                     {"kept", true},
                                     {"kept, fetched together", true, true},
                                     {"kept, queued", true, true, true},
                                     {"kept exact", true, false, false, BackwardMode::Exact}};
// Ends the program if no iteration has that name.
inline const Iteration& iteration_named(const std::string& name) {
  for (const Iteration& one : kIterations) {
    if (name == one.name) return one;
  }
  std::fprintf(stderr, "autograd_bench: no case '%s'\n", name.c_str());
  std::exit(1);
}

inline void iterate(rpc::Agent& agent, const Kept& kept, const Iteration& how) {
  AutogradContext context(agent);
  const RRef<at::Tensor> first = how.keeps ? kept.first : agent.remote<&random_tensor>(1);
  const RRef<at::Tensor> second = how.keeps ? kept.second : agent.remote<&random_tensor>(1);
  at::Tensor a, b;
  if (how.fetches_together) {
    const auto coming = first.fetch(), other = second.fetch();
    a = coming.get();
    b = other.get();
  } else {
    a = first.to_here();
    b = second.to_here();
  }
  const at::Tensor loss = (a + b).sum();
  if (how.keeps && how.queues) {
    const auto pass = context.backward_async({loss}, {.mode = how.mode});
    kept.optimizer.step_async(context).get();
    return;
  }
  context.backward({loss}, {.mode = how.mode});
  if (how.keeps) return kept.optimizer.step(context);
  Optimizer({first, second}, kSgd, {.wait_until_made = !how.queues}).step(context);
}

constexpr std::int64_t kWidth = 512;  // width of a stage
constexpr std::int64_t kBatch = 64;   // size of a micro-batch

inline torch::nn::Sequential make_stage() {
  return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                               torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
}
struct LastStage {
  at::Tensor loss(at::Tensor x) { return net->forward(x).sum(); }
  torch::nn::Sequential net = make_stage();
};

// A model in two stages, the first of which is local: micro-batch after micro-batch, then one
// backward.
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

// Runs two workers of this process, connected by links with a set speed that count messages and
// bytes. Runs in a process of its own: autograd_bench --linked WHAT. Prints numbers, which
// autograd_bench.cc reads.
int work_linked(const std::string& what);

}  // namespace weft::bench
