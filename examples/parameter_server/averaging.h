// SPDX-License-Identifier: Apache-2.0
// Trainers pull the parameters, compute gradients and push them. The server averages the gradients
// of all trainers for a step and answers all of them together, with the new parameters: its answers
// are futures that it keeps until then.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include <weft/weft.h>

#include "../common/progress_bar.h"
#include "net.h"

namespace averaging {

using Tensors = std::vector<at::Tensor>;

inline Tensors values_of(const Net& net) {
  Tensors values;
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

class Server {
 public:
  explicit Server(int trainers)
      : trainers_(trainers),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  Tensors pull() {
    std::lock_guard lock(mutex_);
    return values_of(net_);
  }

  // Answers when every trainer has sent its gradients of this step.
  weft::Future<Tensors> push(Tensors gradients) {
    std::vector<weft::Promise<Tensors>> all;
    weft::Promise<Tensors> promise;
    auto future = promise.future();
    Tensors updated;
    {
      std::lock_guard lock(mutex_);
      auto parameters = net_->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto& gradient = parameters[i].mutable_grad();
        gradient = gradient.defined() && !waiting_.empty() ? gradient + gradients.at(i) / trainers_
                                                           : gradients.at(i) / trainers_;
      }
      waiting_.push_back(promise);
      if (static_cast<int>(waiting_.size()) < trainers_) return future;
      optimizer_.step();
      updated = values_of(net_);
      all.swap(waiting_);
    }
    for (const auto& one : all) one.set(updated);
    return future;
  }

 private:
  const int trainers_;
  std::mutex mutex_;
  Net net_;
  torch::optim::SGD optimizer_;
  std::vector<weft::Promise<Tensors>> waiting_;
};

// Runs on a trainer. Returns the first and the last loss.
inline std::pair<double, double> train(weft::RRef<Server> server, int steps) {
  const int rank = weft::rpc::this_agent().self().rank;
  const Examples data = examples_of(rank);
  Net net;
  const auto take = [&](const Tensors& values) {
    torch::NoGradGuard no_grad;
    auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(values.at(i));
  };
  take(server.sync<&Server::pull>());
  examples::ProgressBar bar("trainer1", static_cast<std::size_t>(steps), rank == 1,
                            examples::Elsewhere::Lines);
  std::pair<double, double> losses;
  for (int step = 0; step < steps; ++step) {
    weft::begin_step();
    net->zero_grad();
    const auto loss = torch::mse_loss(net(data.x), data.y);
    loss.backward();
    Tensors gradients;
    for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
    take(server.sync<&Server::push>(gradients));
    bar.step("loss " + std::to_string(loss.item<double>()));
    (step == 0 ? losses.first : losses.second) = loss.item<double>();
  }
  return losses;
}

}  // namespace averaging
