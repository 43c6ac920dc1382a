// SPDX-License-Identifier: Apache-2.0
// The smallest backward across processes: each worker has its neighbour make two random tensors,
// adds them locally, runs backward to the neighbour, and has an optimizer step the tensors there.
//
//   weft-run --nproc-per-node 2 dist_autograd
#include <cstdio>

#include "../common/progress_bar.h"
#include "../common/workers.h"

namespace {

using torch::Tensor;

Tensor random_tensor() { return torch::rand({3, 3}, torch::TensorOptions().requires_grad(true)); }

void run(weft::rpc::Agent& agent, int steps, double learning_rate) {
  const int neighbour = (agent.self().rank + 1) % static_cast<int>(agent.workers().size());
  const auto a = agent.remote<&random_tensor>(neighbour);
  const auto b = agent.remote<&random_tensor>(neighbour);
  weft::DistributedOptimizer<torch::optim::SGD> optimizer({a, b},
                                                          torch::optim::SGDOptions(learning_rate));
  examples::ProgressBar bar(agent.self().name, static_cast<std::size_t>(steps),
                            agent.self().rank == 0, examples::Elsewhere::Lines);
  double first = 0;
  double last = 0;
  for (int step = 0; step <= steps; ++step) {
    if (step < steps) weft::begin_step();
    weft::AutogradContext context(agent);
    const Tensor loss = (a.to_here() + b.to_here()).sum();
    (step == 0 ? first : last) = loss.item<double>();
    if (step == steps) break;
    context.backward({loss});  // the gradients are stored with the tensors, in this context
    optimizer.step(context);
    bar.step("sum " + std::to_string(loss.item<double>()));
  }
  bar.clear();
  // Every one of the 18 elements has the gradient 1.
  std::printf("%s: the sum fell by %.4f in %d steps, by 18 x %g each\n", agent.self().name.c_str(),
              first - last, steps, learning_rate);
}

}  // namespace

int main(int argc, char** argv) {
  int steps = 5;
  double learning_rate = 0.05;
  examples::Workers workers(
      "dist_autograd", "Two remote random tensors: sum, backward, optimizer step", {.least = 2});
  workers.options.add("--steps", steps, "Optimizer steps", examples::count_from(1));
  workers.options.add("--lr", learning_rate, "Learning rate", examples::positive_number());
  return workers.run(
      argc, argv, [](int rank) { return "worker" + std::to_string(rank); },
      [&](weft::rpc::Agent& agent) { run(agent, steps, learning_rate); });
}
