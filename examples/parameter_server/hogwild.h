// SPDX-License-Identifier: Apache-2.0
// Trainers run forward, backward and the optimizer step on the server's one copy of the network,
// each at its own pace and without locks (Niu et al., "HOGWILD!", 2011). A trainer holds no
// parameters, only references to them. The learning rate is small, because a gradient may be older
// than the parameters that it changes.
#pragma once

#include <utility>

#include <weft/weft.h>

#include "../common/parameters.h"
#include "../common/progress_bar.h"
#include "net.h"

namespace hogwild {

// Runs on a trainer. Returns the first and the last loss.
inline std::pair<double, double> train(weft::RRef<NetImpl> net, int steps) {
  weft::rpc::Agent& agent = weft::rpc::this_agent();
  const int rank = agent.self().rank;
  const Examples data = examples_of(rank);
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(
      net.sync<&examples::parameters_of<NetImpl>>(), torch::optim::SGDOptions(0.02),
      {.order = weft::StepOrder::Hogwild});
  examples::ProgressBar bar("trainer1", static_cast<std::size_t>(steps), rank == 1,
                            examples::Elsewhere::Lines);
  std::pair<double, double> losses;
  for (int step = 0; step < steps; ++step) {
    weft::begin_step();
    weft::AutogradContext context(agent);
    const auto loss = torch::mse_loss(net.sync<&NetImpl::forward>(data.x), data.y);
    context.backward({loss});
    optimizer.step(context);
    bar.step("loss " + std::to_string(loss.item<double>()));
    (step == 0 ? losses.first : losses.second) = loss.item<double>();
  }
  return losses;
}

}  // namespace hogwild
