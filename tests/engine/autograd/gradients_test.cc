// SPDX-License-Identifier: Apache-2.0
// Tests gradients where a pass leaves them: their hooks and their memory.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include <weft/tests/engine/autograd/expected.h>

namespace gradients {

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor mul(at::Tensor a, at::Tensor b) { return a * b; }
// The memory of the gradient that the last backward received, or made, for its first input.
const void* seen = nullptr;
const void* memory_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values().const_data_ptr() : gradient.const_data_ptr();
}
struct Alone : torch::autograd::Function<Alone> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    seen = memory_of(gradients[0]);
    return gradients;
  }
};
struct ForBoth : torch::autograd::Function<ForBoth> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor a, at::Tensor b) {
    return a + b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    seen = memory_of(gradients[0]);
    return {gradients[0], gradients[0]};
  }
};
// Its gradient is an expanded tensor: one number stands for all elements.
struct Expanded : torch::autograd::Function<Expanded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    context->saved_data["sizes"] = x.sizes().vec();
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list) {
    const at::Tensor one =
        at::ones({1}, at::kDouble).expand(context->saved_data["sizes"].toIntVector());
    seen = memory_of(one);
    return {one};
  }
};
// Its gradient is sparse with ten rows: expanded and given to both inputs, or contiguous, for `a`
// only, with memory that other tensors share.
at::Tensor held_indices, held_values;
struct SparseForBoth : torch::autograd::Function<SparseForBoth> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor a, at::Tensor b,
                            bool expanded) {
    context->saved_data["expanded"] = expanded;
    return a + b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list) {
    at::Tensor values = at::rand({1, 3}, at::kDouble).expand({8, 3}),
               indices = at::ones({1, 1}, at::kLong).expand({1, 8});
    if (!context->saved_data["expanded"].toBool()) {
      held_values = values = values.contiguous();
      held_indices = indices = indices.contiguous();
    }
    const at::Tensor gradient = at::_sparse_coo_tensor_unsafe(indices, values, {10, 3});
    seen = memory_of(gradient);
    return {gradient, context->saved_data["expanded"].toBool() ? gradient : at::Tensor(),
            at::Tensor()};
  }
};
// Adds `by` to `count` after its node has run.
struct Counting : torch::autograd::FunctionPostHook {
  Counting(int& count, int by) : count_(count), by_(by) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    count_ += by_;
    return outputs;
  }
  int& count_;
  const int by_;
};

}  // namespace gradients

namespace weft {
namespace {

using namespace harness;

class Gradients : public testing::TestWithParam<Setting> {};

TEST_P(Gradients, HooksRunOnceEachPass) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    a.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    int counted = 0;
    AutogradContext context(agent);
    // Using one tensor twice gives one entry and one run of its hooks.
    at::Tensor y = agent.sync<&gradients::mul>(after(agent, 1), a, b);
    y = agent.sync<&gradients::mul>(after(agent, 2), y, a);
    b.register_hook([&](const at::Tensor&) { ++counted; });
    y.register_hook([&](const at::Tensor&) { ++counted; });
    for (int i = 0; i < 2; ++i) context.backward({y.sum()}, {.retain_graph = true});
    EXPECT_EQ(counted, 4);
    expect_gradients(context, {a, b}, {a.detach() * b.detach() * 8, a.detach() * a.detach() * 2});
  });
}

TEST_P(Gradients, AccumulatorPostHooksRunOncePerPass) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3});
    int counted = 0;
    AutogradContext context(agent);
    const at::Tensor sum = a + a;
    for (const int by : {1, 2}) {
      sum.grad_fn()->next_edge(0).function->add_post_hook(
          std::make_unique<gradients::Counting>(counted, by));
    }
    sum.grad_fn()->next_edge(1).function->add_post_hook(
        std::make_unique<gradients::Counting>(counted, 2));
    const at::Tensor root = agent.sync<&gradients::add>(after(agent, 1), sum, sum).sum();
    for (int pass = 1; pass <= 2; ++pass) {
      context.backward({root}, {.retain_graph = true});
      EXPECT_EQ(counted, 5 * pass);
      expect_gradients(context, {a}, {at::full({3, 3}, 4.0 * pass, at::kDouble)});
    }
  });
}

TEST_P(Gradients, GradientsAreNotShared) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    // Addition gives both inputs one and the same gradient.
    context.backward({agent.sync<&gradients::add>(after(agent, 1), a, b).sum()});
    const auto of_a = context.gradient(a), of_b = context.gradient(b);
    EXPECT_TRUE(of_a.is_contiguous());
    EXPECT_FALSE(of_a.is_alias_of(of_b));
    of_a.zero_();
    EXPECT_TRUE(at::equal(of_b, at::ones({3}, at::kDouble)));
  });
}

TEST(GradientMemory, IsTakenFromItsOnlyUserElseCopied) {
  const auto gradients_of = [](rpc::Agent& agent, const at::Tensor& root,
                               const std::vector<at::Tensor>& leaves) {
    AutogradContext context(agent);
    context.backward({root});
    std::vector<const void*> memory;
    for (const at::Tensor& each : leaves)
      memory.push_back(gradients::memory_of(context.gradient(each)));
    return std::pair(memory, context.gradients());
  };
  run_workers({As::Threads, "inproc", 2}, [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({5, 6}), b = leaf({5, 6});
    {
      const auto [memory, kept] = gradients_of(agent, gradients::Alone::apply(a)[1][0], {a});
      EXPECT_EQ(memory[0], gradients::seen) << "nobody else uses it";
    }
    {
      const auto [memory, kept] =
          gradients_of(agent, gradients::ForBoth::apply(a, b)[1][0], {a, b});
      EXPECT_NE(memory[0], memory[1]) << "the first is copied, and leaves the second the only user";
      EXPECT_TRUE(at::equal(kept[0].second, kept[1].second));
    }
    {
      const auto [memory, kept] = gradients_of(agent, gradients::Expanded::apply(a).sum(), {a});
      EXPECT_NE(memory[0], gradients::seen) << "expanded memory must be copied";
      EXPECT_TRUE(kept[0].second.is_contiguous());
    }
  });
}

TEST(GradientMemory, SparseIsTakenOrCopiedLikewise) {
  run_workers({As::Threads, "inproc", 2}, [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto indices = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}, at::kLong),
               offsets = at::tensor({0, 4}, at::kLong);
    const auto bag = [&](const at::Tensor& weight) {
      return std::get<0>(at::embedding_bag(weight, indices, offsets, false, 0, /*sparse=*/true))
          .sum();
    };
    const auto ten_more = [](AutogradContext& context, const at::Tensor& root,
                             const at::Tensor& parameter) {
      const at::Tensor once = context.gradient(parameter).to_dense().clone();
      for (int i = 0; i < 10; ++i) context.backward({root}, {.retain_graph = true});
      return std::pair(once, context.gradient(parameter).to_dense());
    };
    const auto a = leaf({10, 3}), b = leaf({10, 3});
    {
      AutogradContext context(agent);
      const at::Tensor root = bag(gradients::Alone::apply(a));
      context.backward({root}, {.retain_graph = true});
      EXPECT_EQ(gradients::memory_of(context.gradient(a)), gradients::seen);
      const auto [once, eleven] = ten_more(context, root, a);
      EXPECT_TRUE(at::allclose(eleven, once * 11));
    }
    {
      AutogradContext context(agent);
      const at::Tensor root = bag(gradients::SparseForBoth::apply(a, b, true));
      context.backward({root}, {.retain_graph = true});
      const void *of_a = gradients::memory_of(context.gradient(a)),
                 *of_b = gradients::memory_of(context.gradient(b));
      EXPECT_NE(of_a, gradients::seen);
      EXPECT_NE(of_b, gradients::seen);
      EXPECT_NE(of_a, of_b);
      EXPECT_TRUE(at::equal(context.gradient(a).to_dense(), context.gradient(b).to_dense()));
      for (int i = 0; i < 10; ++i) context.backward({root}, {.retain_graph = true});
      EXPECT_TRUE(at::allclose(context.gradient(a).to_dense(), context.gradient(b).to_dense()));
    }
    {
      AutogradContext context(agent);
      const at::Tensor root = bag(gradients::SparseForBoth::apply(a, b, false));
      context.backward({root}, {.retain_graph = true});
      EXPECT_EQ(gradients::memory_of(context.gradient(a)), gradients::seen)
          << "shared indices and values are no reason to copy";
      const at::Tensor first = gradients::held_values.clone();
      context.backward({root}, {.retain_graph = true});
      EXPECT_TRUE(
          at::allclose(context.gradient(a).to_dense()[1], (first + gradients::held_values).sum(0)));
    }
    gradients::held_values = gradients::held_indices = at::Tensor();
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Gradients, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
