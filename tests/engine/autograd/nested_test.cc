// SPDX-License-Identifier: Apache-2.0
// Tests backward passes within a backward pass: activation recomputation in a context.
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <weft/tests/engine/autograd/settings.h>

namespace nested {

using namespace weft;

// Held as by a module: it is no argument of the function, so only the nested pass leads to it.
struct Weight {
  at::Tensor tensor;
};

// (MKL's tanh() may give other bits in the first threads that use it.)
at::Tensor plain(const at::Tensor& x, const Weight& weight) {
  const auto product = x * weight.tensor;
  return product * product * product;
}

// Computes plain(), which backward() computes again, nested `depth` times.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const Weight& weight, int64_t depth) {
    const c10::AutoGradMode no_grad(false);
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.tensor;
    context->saved_data["depth"] = depth;
    return plain(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const c10::AutoGradMode grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const Weight weight{context->saved_data["weight"].toTensor()};
    const auto depth = context->saved_data["depth"].toInt();
    const auto y = depth > 0 ? apply(x, weight, depth - 1) : plain(x, weight);
    if (gradients[0][0].item<double>() > 1e6) throw std::runtime_error("too large");
    y.backward(gradients[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

// Each worker of a process has its own weight.
Weight& weight_of(int rank) {
  static std::vector<Weight> all(16);
  return all.at(static_cast<std::size_t>(rank));
}
Weight& weight_here() { return weight_of(rpc::this_agent().self().rank); }

at::Tensor call_plain(at::Tensor x) { return plain(x, weight_here()); }
at::Tensor call_recomputed(at::Tensor x, int depth) {
  return Recomputed::apply(x, weight_here(), depth);
}
at::Tensor gradient_here() { return AutogradContext::current().gradient(weight_here().tensor); }
std::size_t gradients_here() { return AutogradContext::current().gradients().size(); }
at::Tensor grad_here() { return weight_here().tensor.grad(); }

}  // namespace nested

namespace weft::harness {
namespace {

using namespace nested;

at::Tensor numbers(double first) { return at::arange(first, first + 3, at::kDouble) / 4; }

class Nested : public testing::TestWithParam<Setting> {
 protected:
  // Sets the weights before any worker may be called.
  static void run(const std::function<void(rpc::Agent&)>& body) {
    for (int rank = 0; rank < GetParam().workers; ++rank) {
      weight_of(rank).tensor = numbers(1).requires_grad_();
      weight_of(rank).tensor.mutable_grad() =
          at::full({3}, 7.0, at::kDouble);  // from the program's own training
    }
    run_workers(GetParam(), body);
  }
};

TEST_P(Nested, GradientsBelongToTheContext) {
  run([](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (const int depth : {0, 1, 3}) {
      for (const auto mode : {BackwardMode::Fast, BackwardMode::Exact}) {
        for (const int where : {0, 1}) {
          const auto x = numbers(2).requires_grad_(), same = numbers(2).requires_grad_();
          AutogradContext expected(agent);
          expected.backward({agent.sync<&call_plain>(where, same).sum()}, {.mode = mode});
          const auto wanted = agent.sync<&gradient_here>(where);
          const auto wanted_x = expected.gradient(same);
          expected.release();

          AutogradContext context(agent);
          context.backward({agent.sync<&call_recomputed>(where, x, depth).sum()}, {.mode = mode});
          EXPECT_TRUE(at::equal(context.gradient(x), wanted_x));
          EXPECT_TRUE(at::equal(agent.sync<&gradient_here>(where), wanted))
              << "depth " << depth << " on " << where;
          // No other tensor has a gradient, not even the input of the nested pass.
          EXPECT_EQ(agent.sync<&gradients_here>(where), where == 0 ? 2U : 1U);
          EXPECT_TRUE(at::equal(agent.sync<&grad_here>(where), at::full({3}, 7.0, at::kDouble)));
          EXPECT_FALSE(x.grad().defined());
        }
      }
    }
  });
}

TEST_P(Nested, SeveralUsesAndPassesAddUp) {
  run([](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto x = numbers(2).requires_grad_();
    const auto both = [&](bool recomputed) {
      AutogradContext context(agent);
      const auto once = [&] {
        return recomputed ? agent.sync<&call_recomputed>(1, x, 0) +
                                agent.sync<&call_recomputed>(1, x * 2, 1) +
                                agent.sync<&call_plain>(1, x * 3)
                          : agent.sync<&call_plain>(1, x) + agent.sync<&call_plain>(1, x * 2) +
                                agent.sync<&call_plain>(1, x * 3);
      };
      context.backward({once().sum()});
      context.backward({once().sum()});
      return std::pair(agent.sync<&gradient_here>(1), context.gradient(x));
    };
    const auto [weight, input] = both(false);
    const auto [recomputed_weight, recomputed_input] = both(true);
    EXPECT_TRUE(at::allclose(recomputed_weight, weight));
    EXPECT_TRUE(at::allclose(recomputed_input, input));
  });
}

// All threads use one parameter at once; each context has its own gradient.
TEST_P(Nested, ThreadsContextsStaySeparate) {
  run([](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    std::vector<at::Tensor> wanted;
    for (int thread = 0; thread < 4; ++thread) {
      const auto x = numbers(thread).requires_grad_();
      AutogradContext context(agent);
      context.backward({agent.sync<&call_plain>(1, x).sum()});
      wanted.push_back(agent.sync<&gradient_here>(1));
    }
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (int again = 0; again < 20; ++again) {
          const auto x = numbers(thread).requires_grad_();
          AutogradContext context(agent);
          context.backward({agent.sync<&call_recomputed>(1, x, again % 2).sum()});
          const auto found = agent.sync<&gradient_here>(1);
          EXPECT_TRUE(at::equal(found, wanted[static_cast<std::size_t>(thread)]))
              << found << " instead of " << wanted[static_cast<std::size_t>(thread)]
              << " in thread " << thread;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(at::equal(agent.sync<&grad_here>(1), at::full({3}, 7.0, at::kDouble)));
  });
}

TEST_P(Nested, FailureLeavesNothing) {
  run([](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto x = numbers(2).requires_grad_();
    AutogradContext context(agent);
    const auto y = agent.sync<&call_recomputed>(1, x, 0);
    const Error error = error_of([&] { context.backward({(y * 1e7).sum()}); });
    EXPECT_NE(error.text().find("too large"), std::string::npos) << error.text();
    EXPECT_EQ(agent.sync<&gradients_here>(1), 0U);
    EXPECT_TRUE(at::equal(agent.sync<&grad_here>(1), at::full({3}, 7.0, at::kDouble)));
  });
}

INSTANTIATE_TEST_SUITE_P(All, Nested, testing::ValuesIn(settings({2})), name_of);

}  // namespace
}  // namespace weft::harness
