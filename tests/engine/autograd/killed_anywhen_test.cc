// SPDX-License-Identifier: Apache-2.0
// Kills a worker at a random instant while all workers train through each other at random. Each
// pass of the others must end, with success or with an error that names the killed worker, and no
// context or reference may remain.
#include <random>

#include <torch/optim/sgd.h>

#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>
#include <weft/tests/harness/killed_anywhen.h>

namespace anywhen {

using namespace weft;
using Weights = std::vector<RRef<at::Tensor>>;  // one on each worker

at::Tensor weight() { return at::rand({3}, at::kDouble).requires_grad_(); }
// Each rank of `path` multiplies by its weight, and calls the next.
at::Tensor through(std::vector<int> path, Weights weights, at::Tensor x) {
  auto& agent = rpc::this_agent();
  const at::Tensor y = x * weights.at(static_cast<std::size_t>(agent.self().rank)).local_value();
  if (path.empty()) return y;
  const int next = path.back();
  path.pop_back();
  return agent.sync<&through>(next, path, weights, y);
}
void nothing() {}

}  // namespace anywhen

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

constexpr int kWorkers = 4;

// One worker's part. A step that involves the killed worker may fail, and its error names that
// worker.
class Trainer {
 public:
  Trainer(rpc::Agent& agent, int seed, std::string victim)
      : agent_(agent),
        victim_(std::move(victim)),
        random_(static_cast<unsigned>(seed * kWorkers + agent.self().rank)) {
    for (int rank = 0; rank < kWorkers; ++rank)
      weights_.push_back(agent.remote<&anywhen::weight>(rank));
    for (const auto& weight : weights_) weight.to_here();
    optimizer_.emplace(weights_, torch::optim::SGDOptions(0.01));
  }
  void step() {
    try {
      trained_step();
    } catch (const std::exception& failed) {
      ++failed_;
      EXPECT_NE(std::string(failed.what()).find(victim_), std::string::npos) << failed.what();
    }
  }
  void drop() {
    optimizer_.reset();
    weights_.clear();
  }
  int failed() const { return failed_; }

 private:
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }
  void trained_step() {
    const BackwardOptions options{.mode = below(2) == 0 ? BackwardMode::Fast : BackwardMode::Exact};
    AutogradContext context(agent_);
    const auto x = leaf({3});
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int path = 1 + below(2); path > 0; --path) {
      std::vector<int> hops;
      for (int hop = below(3); hop > 0; --hop) hops.push_back(below(kWorkers));
      loss = loss + agent_.sync<&anywhen::through>(below(kWorkers), hops, weights_, x).sum();
    }
    if (below(2) == 0) {
      context.backward({loss}, options);
      EXPECT_TRUE(context.gradient(x).defined());
      optimizer_->step(context);
    } else {
      const auto pass = context.backward_async({loss}, options);
      optimizer_->step_async(context).get();
      pass.get();
      EXPECT_TRUE(context.gradient(x).defined());
    }
  }

  rpc::Agent& agent_;
  const std::string victim_;
  std::mt19937 random_;
  anywhen::Weights weights_;
  std::optional<DistributedOptimizer<torch::optim::SGD>> optimizer_;
  int failed_ = 0;
};

class KilledAnywhen : public testing::TestWithParam<KilledCase> {};

TEST_P(KilledAnywhen, OthersPassesEndAndLeaveNothing) {
  const auto& [transport, seed] = GetParam();
  const int victim = seed % kWorkers;
  Processes workers(kWorkers, [transport, seed, victim](int rank) {
    at::set_num_threads(1);
    auto agent = rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .world_size = kWorkers, .timeout = 10s, .transports = {transport}});
    // The killed worker may be the one that hosts the store, so all workers connect before.
    for (int steps = 0; steps < kWorkers; ++steps)
      agent.sync<&anywhen::nothing>(after(agent, steps));
    Trainer trainer(agent, seed, "worker" + std::to_string(victim));
    Processes::say("ready");
    if (rank == victim) {
      for (;;) trainer.step();
    }
    while (trainer.failed() == 0)
      trainer.step();  // one must fail, because each optimizer has a part on the killed worker
    EXPECT_EQ(trainer.failed(), 1);
    for (int i = 0; i < 5; ++i) trainer.step();
    trainer.drop();
    // No survivor ends before the others have finished with it.
    meet_without(agent, victim);
    std::vector<std::size_t> counted;
    comes_true([&] {
      const auto now = agent.debug_info();
      counted = {now.contexts,      now.backward_passes, now.owner_rrefs,  now.forks,
                 now.pending_users, now.calls_waiting,   now.handlers_busy};
      return counted == std::vector<std::size_t>(7);
    });
    EXPECT_EQ(counted, std::vector<std::size_t>(7))
        << "contexts, passes, owners, forks, pending users, calls, handlers";
    meet_without(agent, victim);
  });
  kill_anywhen(workers, kWorkers, victim, seed, 100ms);
}

INSTANTIATE_TEST_SUITE_P(Autograd, KilledAnywhen,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Range(0, 8)),
                         killed_name);

}  // namespace
}  // namespace weft
