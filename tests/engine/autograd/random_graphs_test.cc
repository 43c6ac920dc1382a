// SPDX-License-Identifier: Apache-2.0
// Tests that random graphs, cut at random places, have the gradients that they have in one process.
#include <map>
#include <random>

#include <torch/autograd.h>

#include <weft/tests/engine/autograd/settings.h>

namespace random_graphs {

using namespace weft;

enum class Op { Add, Mul, Matmul, Tanh, Halves, Detached };

std::vector<at::Tensor> apply(Op op, at::Tensor a, at::Tensor b) {
  switch (op) {
    case Op::Add: return {a + b};
    case Op::Mul: return {a * b};
    case Op::Matmul: return {a.matmul(b) * 0.2};
    case Op::Tanh: return {a.tanh()};
    case Op::Halves: return {a * 0.5, b.sin()};
    case Op::Detached: return {a.detach() * b};
  }
  return {};
}
// Each rank of `path` calls the next; the last computes.
std::vector<at::Tensor> apply_on(std::vector<int> path, Op op, at::Tensor a, at::Tensor b) {
  if (path.empty()) return apply(op, a, b);
  const int next = path.front();
  path.erase(path.begin());
  return rpc::this_agent().sync<&apply_on>(next, path, op, a, b);
}
at::Tensor given(at::Tensor value) { return value.detach().requires_grad_(); }
at::Tensor gradient_of(RRef<at::Tensor> leaf) {
  return AutogradContext::current().gradient(leaf.local_value());
}

struct Step {
  Op op = Op::Add;
  std::size_t a = 0, b = 0;
  std::vector<int> path;  // empty: runs here
};
struct Plan {
  std::vector<at::Tensor> leaves;
  std::vector<int> owners;
  std::vector<Step> steps;
  std::vector<std::size_t> roots;
  bool exact = false;
  int passes = 1;
};

Plan plan(std::uint64_t seed, int workers) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::size_t below) { return static_cast<std::size_t>(random() % below); };
  Plan plan;
  plan.exact = seed % 2 == 1;
  plan.passes = seed % 4 < 2 ? 2 : 1;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (std::size_t i = 0, leaves = 2 + pick(4); i < leaves; ++i) {
    plan.leaves.push_back(at::rand({3, 3}, generator, at::TensorOptions().dtype(at::kDouble)));
    plan.owners.push_back(static_cast<int>(pick(static_cast<std::size_t>(workers))));
  }
  std::size_t values = plan.leaves.size();
  for (std::size_t i = 0, steps = 3 + pick(12); i < steps; ++i) {
    Step step;
    step.op = static_cast<Op>(
        pick(plan.exact ? 6 : 5));  // Detached leads nowhere, which Fast does not allow
    step.a = pick(values);
    step.b = values - 1 - pick(std::min<std::size_t>(values, 4));
    for (std::size_t hops = pick(4); hops > 0; --hops)
      step.path.push_back(static_cast<int>(pick(static_cast<std::size_t>(workers))));
    plan.steps.push_back(step);
    values += step.op == Op::Halves ? 2 : 1;
  }
  if (plan.exact) {
    // Some results are roots; the others lead nowhere.
    for (std::size_t i = 0, roots = 1 + pick(3); i < roots; ++i)
      plan.roots.push_back(plan.leaves.size() + pick(values - plan.leaves.size()));
  } else {
    for (std::size_t i = plan.leaves.size(); i < values; ++i) plan.roots.push_back(i);
  }
  return plan;
}

// Returns the sum of the roots; `run` computes each step.
template <class Run>
at::Tensor loss_of(const Plan& plan, std::vector<at::Tensor> values, Run run) {
  for (const Step& step : plan.steps) {
    for (const at::Tensor& result : run(step, values[step.a], values[step.b]))
      values.push_back(result);
  }
  at::Tensor loss;
  for (const std::size_t root : plan.roots)
    loss = loss.defined() ? loss + values[root].sum() : values[root].sum();
  return loss;
}

}  // namespace random_graphs

namespace weft {
namespace {

using namespace harness;
using namespace random_graphs;

struct Run {
  Setting setting;
  int graphs = 0;
};
void PrintTo(const Run& run, std::ostream* out) {
  *out << run.graphs << " graphs, " << name(run.setting);
}

class RandomGraphs : public testing::TestWithParam<Run> {};

TEST_P(RandomGraphs, HaveTheGradientsOfOneProcess) {
  const int workers = GetParam().setting.workers, graphs = GetParam().graphs;
  run_workers(GetParam().setting, [workers, graphs](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    int compared = 0, twice = 0;
    std::map<bool, int> modes;
    for (int i = 0; compared < graphs; ++i) {
      const Plan graph = plan(static_cast<std::uint64_t>(1000 * workers + i), workers);
      std::vector<at::Tensor> own;
      for (const at::Tensor& value : graph.leaves) own.push_back(given(value));
      const at::Tensor local =
          loss_of(graph, own, [](const Step& step, const at::Tensor& a, const at::Tensor& b) {
            return random_graphs::apply(step.op, a, b);
          });
      if (!local.requires_grad()) continue;  // only detached values: takes another graph instead
      const auto expected =
          torch::autograd::grad({local}, own, {}, std::nullopt, false, /*allow_unused=*/true);

      AutogradContext context(agent);
      std::vector<RRef<at::Tensor>> leaves;
      std::vector<at::Tensor> values;
      for (std::size_t k = 0; k < graph.leaves.size(); ++k) {
        leaves.push_back(agent.remote<&given>(graph.owners[k], graph.leaves[k]));
        values.push_back(leaves.back().to_here());
      }
      // In Fast mode, values that are fetched and not used must lead to the loss as well.
      at::Tensor loss =
          loss_of(graph, values, [&](const Step& step, const at::Tensor& a, const at::Tensor& b) {
            if (step.path.empty()) return random_graphs::apply(step.op, a, b);
            std::vector<int> rest(step.path.begin() + 1, step.path.end());
            return agent.sync<&apply_on>(step.path.front(), rest, step.op, a, b);
          });
      if (!graph.exact) {
        for (const at::Tensor& value : values) loss = loss + value.sum() * 0;
      }
      ASSERT_NEAR(loss.item<double>(), local.item<double>(), 1e-9);
      for (int pass = 1; pass <= graph.passes; ++pass) {
        context.backward({loss}, {.retain_graph = pass < graph.passes,
                                  .mode = graph.exact ? BackwardMode::Exact : BackwardMode::Fast});
        for (std::size_t k = 0; k < leaves.size(); ++k) {
          const at::Tensor gradient = agent.sync<&gradient_of>(graph.owners[k], leaves[k]);
          const at::Tensor zero = at::zeros({3, 3}, at::kDouble);
          EXPECT_TRUE(at::allclose(gradient.defined() ? gradient : zero,
                                   expected[k].defined() ? expected[k] * pass : zero, 1e-10, 1e-10))
              << "graph " << i << ", leaf " << k << ", pass " << pass;
          EXPECT_TRUE(!graph.exact || gradient.defined() == expected[k].defined())
              << "graph " << i << ", leaf " << k;
        }
      }
      ++compared;
      ++modes[graph.exact];
      twice += graph.passes == 2 ? 1 : 0;
    }
    EXPECT_EQ(compared, graphs);
    EXPECT_GT(std::min(modes[true], modes[false]), graphs / 3) << "both modes";
    EXPECT_GT(twice, graphs / 4) << "passes over a retained graph";
  });
}

std::vector<Run> runs() {
  std::vector<Run> all;
  for (const Setting& setting : settings({2, 3, 4}))
    all.push_back({setting, setting.transport == "inproc" ? 80 : 20});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Autograd, RandomGraphs, testing::ValuesIn(runs()),
                         [](const auto& run) { return name(run.param.setting); });

}  // namespace
}  // namespace weft
