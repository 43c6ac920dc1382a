// SPDX-License-Identifier: Apache-2.0
// Compares random training programs under DistributedDataParallel with the results of one process:
// forwards inside and outside of no_sync, backwards in any order and of several forwards at once,
// kept graphs, frozen, thawed, replaced and unused parameters, static graphs. Every gradient equals
// that of the model, or the program is refused by name; no program ends with other gradients.
#include <algorithm>
#include <atomic>
#include <functional>
#include <iostream>
#include <optional>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/module.h>
#include <torch/types.h>

#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft::testing {
namespace {

constexpr std::size_t kWeights = 5;

// The gradient of weight i is the sum of the inputs of all forwards that use it.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (std::size_t i = 0; i < kWeights; ++i)
      weights.push_back(
          register_parameter("w" + std::to_string(i), torch::ones({2}, torch::kDouble)));
  }
  torch::Tensor forward(const std::vector<bool>& uses, double x) {
    torch::Tensor sum = torch::zeros({2}, torch::kDouble).requires_grad_() * 1;
    for (std::size_t i = 0; i < kWeights; ++i) {
      if (uses[i]) sum = sum + weights[i] * x;
    }
    return sum;
  }
  // Replaces a weight, as a program does that exchanges a layer.
  void replace(std::size_t i) {
    weights[i] = parameters_["w" + std::to_string(i)] =
        torch::ones({2}, torch::kDouble).requires_grad_();
  }
  std::vector<torch::Tensor> weights;
};

struct Forward {
  bool synchronizes = true;
  std::vector<std::vector<bool>> uses;  // by rank
};

struct Step {
  std::optional<std::size_t> replaced;  // weight that is replaced before the forwards
  std::vector<bool> trained;            // requires_grad
  bool zeroes = true;                   // gradients are zeroed at the beginning
  std::vector<Forward> forwards;
  std::vector<std::vector<std::size_t>>
      backwards;  // the forwards whose sums each adds up; a backward may repeat
};

struct Program {
  int ranks = 2;
  DdpOptions options;
  std::vector<bool> trained_at_first;
  std::vector<Step> steps;
};

double input_of(std::size_t step, std::size_t forward, int rank) {
  return static_cast<double>((rank + 1) * (rank + 2)) +
         16.0 * static_cast<double>(forward + 4 * step);
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(engine_);
  }
  bool once_in(std::size_t times) { return below(times) == 0; }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

std::vector<bool> some_trained(Dice& dice) {
  std::vector<bool> trained(kWeights, true);
  if (dice.once_in(2)) return trained;
  for (std::size_t i = 0; i < kWeights; ++i) trained[i] = !dice.once_in(3);
  trained[dice.below(kWeights)] = true;
  return trained;
}

// Each step has one forward and one backward. They use the same weights every time, but not the
// same ones on all ranks.
Program draw_static(Dice& dice) {
  Program program;
  program.ranks = dice.once_in(3) ? 3 : 2;
  program.options.static_graph = true;
  program.options.gradient_as_bucket_view = dice.once_in(2);
  program.options.bucket_bytes = program.options.first_bucket_bytes = dice.once_in(2) ? 1 : 1 << 20;
  program.trained_at_first = some_trained(dice);
  Forward forward;
  for (int rank = 0; rank < program.ranks; ++rank) {
    std::vector<bool> uses(kWeights, true);
    for (std::size_t i = 0; i < kWeights; ++i) uses[i] = !dice.once_in(3);
    forward.uses.push_back(std::move(uses));
  }
  for (std::size_t count = 3 + dice.below(3); count > 0; --count) {
    Step step;
    step.trained = program.trained_at_first;
    step.zeroes = !dice.once_in(3);
    forward.synchronizes = count != 1 || !dice.once_in(2);
    step.forwards.push_back(forward);
    step.backwards = {{0}};
    program.steps.push_back(std::move(step));
  }
  return program;
}

Program draw(std::uint64_t seed) {
  Dice dice(seed);
  if (dice.once_in(8)) return draw_static(dice);
  Program program;
  program.ranks = dice.once_in(3) ? 3 : 2;
  program.options.find_unused_parameters = dice.once_in(2);
  program.options.gradient_as_bucket_view = dice.once_in(2);
  const std::size_t bytes[] = {1, 24, 1 << 20};
  program.options.bucket_bytes = program.options.first_bucket_bytes = bytes[dice.below(3)];
  program.trained_at_first = some_trained(dice);
  const bool leaves_out = program.options.find_unused_parameters || dice.once_in(4);
  std::vector<bool> trained = program.trained_at_first;
  for (std::size_t count = 3 + dice.below(3); count > 0; --count) {
    Step step;
    if (dice.once_in(3)) trained = some_trained(dice);
    step.trained = trained;
    step.zeroes = !dice.once_in(3);
    if (dice.once_in(20)) step.replaced = dice.below(kWeights);
    for (std::size_t forwards = 1 + dice.below(3); forwards > 0; --forwards) {
      Forward forward;
      forward.synchronizes = !dice.once_in(3);
      for (int rank = 0; rank < program.ranks; ++rank) {
        std::vector<bool> uses(kWeights, true);
        for (std::size_t i = 0; leaves_out && i < kWeights; ++i) uses[i] = !dice.once_in(3);
        // Without the search, all ranks leave out the same weights.
        if (!program.options.find_unused_parameters && rank > 0) uses = forward.uses.front();
        forward.uses.push_back(std::move(uses));
      }
      step.forwards.push_back(std::move(forward));
    }
    std::vector<std::size_t> order(step.forwards.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), dice.engine());
    for (const std::size_t forward : order) {
      if (step.backwards.empty() || !dice.once_in(3)) step.backwards.emplace_back();
      step.backwards.back().push_back(forward);
    }
    if (dice.once_in(4))
      step.backwards.push_back(step.backwards[dice.below(step.backwards.size())]);
    if (dice.once_in(6))
      step.backwards.erase(step.backwards.begin());  // these outputs get no backward
    program.steps.push_back(std::move(step));
  }
  return program;
}

// Computes the gradients of all ranks in one process.
class Model {
 public:
  explicit Model(const Program& program) : program_(program) {
    gradients_.resize(static_cast<std::size_t>(program.ranks),
                      std::vector<std::optional<double>>(kWeights));
    used_.resize(kWeights);
    taken_.resize(kWeights);
  }
  void zero() {
    for (auto& rank : gradients_) rank.assign(kWeights, std::nullopt);
  }
  // True if a backward has reduced some gradients and left out others: then the next forward that
  // synchronises is refused.
  bool is_unfinished() const {
    return std::find(taken_.begin(), taken_.end(), true) != taken_.end();
  }
  // Also true if a frozen weight has a gradient that no pass would average.
  bool refuses_forward(const std::vector<bool>& trained) const {
    if (is_unfinished()) return true;
    for (std::size_t i = 0; i < kWeights; ++i) {
      if (!finds_unused() && used_[i] && !trained[i]) return true;
    }
    return false;
  }
  // Returns false if the backward is refused.
  bool backward(std::size_t step, const std::vector<std::size_t>& forwards) {
    const Step& now = program_.steps[step];
    bool synchronizes = false;
    std::vector<bool> comes(kWeights);
    for (const std::size_t index : forwards) {
      const Forward& forward = now.forwards[index];
      synchronizes |= forward.synchronizes;
      for (std::size_t rank = 0; rank < gradients_.size(); ++rank) {
        for (std::size_t i = 0; i < kWeights; ++i) {
          if (!forward.uses[rank][i] || !now.trained[i]) continue;
          auto& gradient = gradients_[rank][i];
          gradient = gradient.value_or(0) + input_of(step, index, static_cast<int>(rank));
          used_[i] = comes[i] = true;
        }
      }
    }
    if (finds_unused()) {
      if (!synchronizes) return true;
      for (std::size_t i = 0; i < kWeights; ++i) {
        if (used_[i]) average(i);  // otherwise no rank used it, and each keeps its gradient
      }
      used_.assign(kWeights, false);
      return true;
    }
    for (std::size_t i = 0; i < kWeights; ++i) {
      if (comes[i] && taken_[i]) return false;
      if (synchronizes && comes[i]) taken_[i] = true;
    }
    if (taken_ != now.trained) return true;
    for (std::size_t i = 0; i < kWeights; ++i) {
      if (taken_[i]) average(i);
    }
    taken_.assign(kWeights, false);
    used_.assign(kWeights, false);
    return true;
  }
  const std::vector<std::optional<double>>& gradients(int rank) const {
    return gradients_[static_cast<std::size_t>(rank)];
  }

 private:
  bool finds_unused() const {
    return program_.options.find_unused_parameters || program_.options.static_graph;
  }
  void average(std::size_t weight) {
    double sum = 0;
    for (const auto& rank : gradients_) sum += rank[weight].value_or(0);
    for (auto& rank : gradients_) rank[weight] = sum / program_.ranks;
  }

  const Program& program_;
  std::vector<std::vector<std::optional<double>>> gradients_;
  std::vector<bool> used_;   // used since the last pass
  std::vector<bool> taken_;  // reduced by an unfinished pass; not used if finds_unused()
};

void apply(NetImpl& net, const std::vector<bool>& trained) {
  for (std::size_t i = 0; i < kWeights; ++i) net.weights[i].set_requires_grad(trained[i]);
}

// Returns false if the program was refused, as it had to be.
bool run(const Program& program, ProcessGroup& group, std::uint64_t seed) {
  auto net = std::make_shared<NetImpl>();
  apply(*net, program.trained_at_first);
  DistributedDataParallel<NetImpl> ddp(net, group, program.options);
  Model model(program);
  // Expects the call to be refused exactly if `must_be`. Returns whether the program ends here.
  const auto is_refused = [&](bool must_be, const std::string& what,
                              const std::function<void()>& call) {
    std::optional<Error> error;
    try {
      call();
    } catch (const Error& refused) {
      error = refused;
    }
    EXPECT_EQ(error.has_value(), must_be)
        << "seed " << seed << ", " << what << ": " << (error ? error->what() : "no error");
    if (error) EXPECT_EQ(error->blame(), Blame::Caller) << error->what();
    return error.has_value() || must_be;
  };
  for (std::size_t step = 0; step < program.steps.size(); ++step) {
    const Step& now = program.steps[step];
    const std::string where = "step " + std::to_string(step);
    if (now.replaced) net->replace(*now.replaced);
    apply(*net, now.trained);
    if (now.zeroes) {
      model.zero();
      for (auto& weight : net->weights) weight.mutable_grad() = torch::Tensor();
    }
    std::vector<torch::Tensor> outputs;
    for (std::size_t i = 0; i < now.forwards.size(); ++i) {
      const Forward& forward = now.forwards[i];
      const auto call = [&] {
        const auto scope = ddp.no_sync(!forward.synchronizes);
        outputs.push_back(ddp(forward.uses[static_cast<std::size_t>(group.rank())],
                              input_of(step, i, group.rank())));
      };
      const bool must_be =
          now.replaced || (forward.synchronizes && model.refuses_forward(now.trained));
      if (is_refused(must_be, where + ", a forward", call)) return false;
    }
    for (const auto& backward : now.backwards) {
      torch::Tensor loss;
      for (const std::size_t i : backward)
        loss = loss.defined() ? loss + outputs[i].sum() : outputs[i].sum();
      const bool must_be_refused = !model.backward(step, backward);
      if (is_refused(must_be_refused, where + ", a backward",
                     [&] { loss.backward({}, /*retain_graph=*/true); }))
        return false;
      for (std::size_t i = 0; i < kWeights && !model.is_unfinished(); ++i) {
        const auto& right = model.gradients(group.rank())[i];
        const torch::Tensor& gradient = net->weights[i].grad();
        EXPECT_EQ(gradient.defined(), right.has_value())
            << "weight " << i << ", seed " << seed << ", " << where;
        if (!gradient.defined() || !right) continue;
        EXPECT_NEAR(gradient[0].item<double>(), *right, 1e-9)
            << "weight " << i << ", seed " << seed << ", " << where;
      }
      if (::testing::Test::HasFailure()) return true;
    }
  }
  const auto next = [&] { ddp(std::vector<bool>(kWeights, true), 1.0); };
  return !is_refused(model.refuses_forward(program.steps.back().trained), "the end", next);
}

TEST(RandomPrograms, MatchOneProcessOrAreRefused) {
  const char* const wanted = std::getenv("WEFT_TEST_PROGRAMS");  // FIRST or FIRST:COUNT
  std::uint64_t first = 1;
  std::uint64_t count = harness::runs_all_settings() ? 500 : 20;
  if (wanted != nullptr) {
    first = std::stoull(wanted);
    const std::string text = wanted;
    count = text.find(':') == std::string::npos ? 1 : std::stoull(text.substr(text.find(':') + 1));
  }
  std::cout << "programs of the seeds " << first << " to " << first + count - 1 << std::endl;
  std::atomic<int> refused{0};
  for (std::uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    const Program program = draw(seed);
    harness::run_ranks(harness::As::Threads, program.ranks, [&](ProcessGroup group) {
      if (!run(program, group, seed) && group.rank() == 0) ++refused;
    });
  }
  std::cout << refused << " of them were refused by name" << std::endl;
}

}  // namespace
}  // namespace weft::testing
