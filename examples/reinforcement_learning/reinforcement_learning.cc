// SPDX-License-Identifier: Apache-2.0
// Policy-gradient learning with one agent and several observers. Each observer has a world of its
// own, a pole on a cart that must be kept upright; it asks the agent for each action, through a
// reference to the agent's policy. The agent holds the policy, and learns when all observers have
// reported the rewards of an episode.
//
//   weft-run --nproc-per-node 3 reinforcement_learning
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "../common/cart_pole.h"
#include "../common/workers.h"

namespace {

using examples::CartPole;
using weft::Future;
using weft::RRef;

constexpr int kMostSteps = 200;  // steps of an episode
constexpr double kDiscount = 0.99;

class Policy {
 public:
  Policy()
      : net_(torch::nn::Linear(4, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2)),
        optimizer_(net_->parameters(), torch::optim::AdamOptions(1e-2)) {}

  // Returns an action for an observer's state. All observers call it concurrently.
  bool act(int observer, std::vector<float> state) {
    std::lock_guard lock(mutex_);
    const auto logits = net_->forward(torch::tensor(state));
    const auto chances = torch::softmax(logits, 0);
    const bool right = torch::bernoulli(chances[1].detach()).item<float>() > 0.5F;
    logs_[observer].push_back(torch::log(chances[right ? 1 : 0]));
    return right;
  }

  // Learns from the rewards: the numbers of steps that each observer's pole stood.
  void learn() {
    std::lock_guard lock(mutex_);
    std::vector<at::Tensor> losses;
    std::vector<float> returns;
    std::vector<at::Tensor> logs;
    for (auto& [observer, steps] : logs_) {
      double future = 0;
      std::vector<float> own(steps.size());
      for (std::size_t i = steps.size(); i-- > 0;)
        own[i] = static_cast<float>(future = 1 + kDiscount * future);
      returns.insert(returns.end(), own.begin(), own.end());
      logs.insert(logs.end(), steps.begin(), steps.end());
    }
    auto worth = torch::tensor(returns);
    worth = (worth - worth.mean()) / (worth.std() + 1e-6);
    optimizer_.zero_grad();
    (-(torch::stack(logs) * worth).sum()).backward();
    optimizer_.step();
    logs_.clear();
  }

 private:
  std::mutex mutex_;
  torch::nn::Sequential net_;
  torch::optim::Adam optimizer_;
  std::map<int, std::vector<at::Tensor>> logs_;  // log-probabilities of the chosen actions
};

class Observer {
 public:
  explicit Observer(int number) : number_(number), world_(static_cast<unsigned>(number)) {}

  // Runs one episode; returns how many steps the pole stood.
  int run(RRef<Policy> policy) {
    auto state = world_.reset();
    for (int step = 1; step <= kMostSteps; ++step) {
      if (!world_.push(policy.sync<&Policy::act>(number_, state))) return step;
      state = world_.state();
    }
    return kMostSteps;
  }

 private:
  const int number_;
  CartPole world_;
};

void drive(weft::rpc::Agent& agent, int episodes, double goal) {
  const int observers = static_cast<int>(agent.workers().size()) - 1;
  torch::manual_seed(1);
  const RRef<Policy> policy = agent.remote<Policy>(0);
  std::vector<RRef<Observer>> all;
  for (int observer = 1; observer <= observers; ++observer)
    all.push_back(agent.remote<Observer>(observer, observer));
  double mean = 0;
  for (int episode = 1; episode <= episodes; ++episode) {
    weft::begin_step();
    std::vector<Future<int>> runs;
    for (const auto& observer : all) runs.push_back(observer.async<&Observer::run>(policy));
    double reward = 0;
    for (const auto& run : runs) reward += run.get() / static_cast<double>(observers);
    policy.sync<&Policy::learn>();
    mean = episode == 1 ? reward : 0.9 * mean + 0.1 * reward;
    if (episode % 10 == 0)
      std::printf("episode %3d: reward %5.1f, mean of the last ones %5.1f\n", episode, reward,
                  mean);
    if (mean > goal) {
      std::printf("solved: mean reward %.1f after %d episodes\n", mean, episode);
      return;
    }
  }
  throw std::runtime_error("the mean reward came to " + std::to_string(mean) + " only");
}

}  // namespace

int main(int argc, char** argv) {
  int episodes = 500;
  double goal = 150;
  examples::Workers workers("reinforcement_learning",
                            "An agent learns to balance a pole from observers of a world each",
                            {.least = 2, .usual = 3});
  workers.options.add("--episodes", episodes, "At most so many", examples::count_from(1));
  workers.options.add("--goal", goal, "Mean reward at which it ends", examples::positive_number());
  return workers.run(
      argc, argv, [](int rank) { return rank == 0 ? "agent" : "observer" + std::to_string(rank); },
      [&](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) drive(agent, episodes, goal);
      });
}
