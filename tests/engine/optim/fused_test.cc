// SPDX-License-Identifier: Apache-2.0
// Compares the fused optimizers with libtorch's own.
#include <functional>
#include <memory>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <weft/error.h>
#include <weft/optim.h>

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Tensors = std::vector<torch::Tensor>;

// Makes parameters of several shapes, one of them channels-last. set_gradients() gives one of them
// no gradient in some steps.
Tensors make_parameters(torch::ScalarType dtype) {
  torch::manual_seed(1);
  Tensors parameters;
  for (const std::vector<std::int64_t>& shape :
       std::initializer_list<std::vector<std::int64_t>>{{7}, {3, 5}, {}, {0}, {2, 3, 4, 4}}) {
    parameters.push_back(torch::randn(shape, torch::kDouble).to(dtype));
  }
  parameters.back() = parameters.back().to(torch::MemoryFormat::ChannelsLast);
  for (auto& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

void set_gradients(const Tensors& parameters, int step) {
  torch::manual_seed(100 + step);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto parameter = parameters[i];
    const auto gradient =
        torch::randn(parameter.sizes(), torch::kDouble).to(parameter.scalar_type());
    parameter.mutable_grad() = i == 1 && step % 3 == 0 ? torch::Tensor() : gradient;
  }
}

void expect_close(const Tensors& actual, const Tensors& expected, int step) {
  const double tolerance = actual[0].scalar_type() == torch::kDouble ? 1e-13 : 2e-6;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], tolerance, tolerance))
        << "parameter " << i << " step " << step;
    EXPECT_EQ(actual[i].strides(), expected[i].strides());
  }
}

template <class Fused, class Plain, class Options>
void expect_equal(const Options& options) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const Tensors fused_parameters = make_parameters(dtype);
    const Tensors plain_parameters = make_parameters(dtype);
    Fused fused(fused_parameters, options);
    Plain plain(plain_parameters, options);
    for (int step = 0; step < 10; ++step) {
      set_gradients(fused_parameters, step);
      set_gradients(plain_parameters, step);
      fused.step();
      plain.step();
      expect_close(fused_parameters, plain_parameters, step);
    }
  }
}

TEST(FusedSGD, StepsLikeLibtorchs) {
  for (const auto& options :
       {SGDOptions(0.1), SGDOptions(0.1).momentum(0.9),
        SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.01),
        SGDOptions(0.1).momentum(0.9).nesterov(true), SGDOptions(0.1).weight_decay(0.1)}) {
    expect_equal<FusedSGD, torch::optim::SGD>(options);
  }
}

TEST(FusedAdamW, StepsLikeLibtorchs) {
  for (const auto& options :
       {AdamWOptions(0.01), AdamWOptions(0.01).amsgrad(true).weight_decay(0.1),
        AdamWOptions(0.01).betas({0.5, 0.7}).eps(1e-3).weight_decay(0)}) {
    expect_equal<FusedAdamW, torch::optim::AdamW>(options);
  }
}

// Steps First, saves its state to a file, loads it into Second, and compares the steps that follow.
template <class First, class Second, class Options>
void expect_takes_over(const Options& options) {
  const Tensors first_parameters = make_parameters(torch::kDouble);
  const Tensors second_parameters = make_parameters(torch::kDouble);
  First first(first_parameters, options);
  Second second(second_parameters, options);
  for (int step = 0; step < 4; ++step) {
    set_gradients(first_parameters, step);
    first.step();
  }
  std::stringstream file;
  torch::save(first, file);
  torch::load(second, file);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < first_parameters.size(); ++i)
      second_parameters[i].copy_(first_parameters[i]);
  }
  for (int step = 4; step < 8; ++step) {
    set_gradients(first_parameters, step);
    set_gradients(second_parameters, step);
    first.step();
    second.step();
    expect_close(second_parameters, first_parameters, step);
  }
}

TEST(FusedOptimizers, LazilyNegatedGradientIsResolved) {
  const at::Tensor parameter = torch::zeros({4}, torch::requires_grad());
  parameter.mutable_grad() = at::_neg_view(torch::ones({4}));
  ASSERT_TRUE(parameter.grad().is_neg());
  FusedSGD({parameter}, torch::optim::SGDOptions(1)).step();
  EXPECT_TRUE(parameter.detach().equal(torch::ones({4}))) << parameter;
}

TEST(FusedOptimizers, ExchangeFilesWithLibtorchs) {
  const auto sgd = SGDOptions(0.1).momentum(0.9);
  expect_takes_over<FusedSGD, torch::optim::SGD>(sgd);
  expect_takes_over<torch::optim::SGD, FusedSGD>(sgd);
  const auto adamw = AdamWOptions(0.01).amsgrad(true);
  expect_takes_over<FusedAdamW, torch::optim::AdamW>(adamw);
  expect_takes_over<torch::optim::AdamW, FusedAdamW>(adamw);
}

// The fused optimizer computes in fp32 and rounds when it stores. libtorch gives the same for fp32
// parameters that are rounded after each step.
TEST(FusedOptimizers, SixteenBitStepsComputeInFp32) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    auto parameter = torch::randn({100}, torch::kDouble).to(dtype);
    auto wide = parameter.to(torch::kFloat);
    FusedSGD fused({parameter}, SGDOptions(0.1));
    torch::optim::SGD plain({wide}, SGDOptions(0.1));
    for (int step = 0; step < 5; ++step) {
      parameter.mutable_grad() = torch::randn({100}).to(dtype);
      wide.mutable_grad() = parameter.grad().to(torch::kFloat);
      fused.step();
      plain.step();
      wide.copy_(wide.to(dtype));
      const double last_place = dtype == torch::kHalf ? 0x1p-10 : 0x1p-7;
      EXPECT_TRUE(torch::allclose(parameter.to(torch::kFloat), wide, last_place, last_place));
    }
  }
}

TEST(FusedOptimizers, ClosureIsCalledOnceAndReturned) {
  auto x = torch::ones({1}).requires_grad_();
  FusedSGD fused({x}, SGDOptions(0.5));
  int calls = 0;
  const auto loss = fused.step([&] {
    ++calls;
    auto value = x * 3;
    value.backward();
    return value;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_EQ(x.item<float>(), -0.5F);
}

// True if backward() notices that a step has changed a parameter which its graph had saved.
template <class Optimizer, class Options>
bool notices_a_step(const Options& options) {
  auto parameter = torch::ones({3}, torch::requires_grad());
  const auto saved = parameter.pow(2).sum();
  parameter.mutable_grad() = torch::ones({3});
  Optimizer({parameter}, options).step();
  try {
    saved.backward();
    return false;
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    return true;
  }
}

TEST(FusedOptimizers, OldGraphIsAsValidAsWithLibtorch) {
  EXPECT_EQ(notices_a_step<FusedSGD>(SGDOptions(0.1)),
            notices_a_step<torch::optim::SGD>(SGDOptions(0.1)));
  EXPECT_EQ(notices_a_step<FusedAdamW>(AdamWOptions(0.1)),
            notices_a_step<torch::optim::AdamW>(AdamWOptions(0.1)));
  EXPECT_TRUE(notices_a_step<FusedAdamW>(AdamWOptions(0.1)));
}

TEST(FusedOptimizers, BadParametersAreRefusedUpFront) {
  const auto refuse = [](torch::Tensor other, const torch::Tensor& gradient,
                         const std::string& why) {
    auto first = torch::ones({1}).requires_grad_();
    first.mutable_grad() = torch::ones({1});
    other.mutable_grad() = gradient;
    const auto expect_refused = [&](torch::optim::Optimizer& optimizer, const std::string& advice) {
      try {
        optimizer.step();
        ADD_FAILURE() << "no error: " << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Caller);
        EXPECT_THAT(error.what(), HasSubstr(why));
        EXPECT_THAT(error.what(), HasSubstr(advice));
      }
      EXPECT_TRUE(optimizer.state().empty());
      EXPECT_EQ(first.item<float>(), 1);
    };
    FusedSGD sgd({first, other}, SGDOptions(0.1).momentum(0.9));
    expect_refused(sgd, "use torch::optim::SGD");
    FusedAdamW adamw({first, other});
    expect_refused(adamw, "use torch::optim::AdamW");
  };
  refuse(torch::ones({2}), torch::ones({2}).to_sparse(), "a gradient is sparse");
  refuse(torch::ones({2}, torch::kComplexFloat), torch::ones({2}, torch::kComplexFloat),
         "fp16, bf16, fp32 and fp64");
  refuse(torch::ones({4}).slice(0, 0, 4, 2), torch::ones({2}), "gaps or overlaps");
  refuse(torch::ones({2}), torch::ones({3}), "another shape");
}

// The state has another type than the parameter: it was loaded, or made before set_data() changed
// the parameter's type, as module->to() does. libtorch computes with both types; the fused
// optimizers convert the state to the parameter's type.
template <class Fused, class Plain, class Options>
void expect_goes_on_as(torch::ScalarType before, torch::ScalarType state, torch::ScalarType after,
                       const Options& options) {
  torch::manual_seed(1);
  const auto start = torch::randn({50}, torch::kDouble).to(before);
  const std::vector<torch::Tensor> gradients = {torch::randn({50}), torch::randn({50}),
                                                torch::randn({50})};
  const auto run = [&]<class Optimizer>(std::type_identity<Optimizer>) {
    auto parameter = start.clone();
    Optimizer optimizer({parameter}, options);
    for (int step = 0; step < 2; ++step) {
      parameter.mutable_grad() = gradients[static_cast<std::size_t>(step)].to(before);
      optimizer.step();
    }
    parameter.mutable_grad() = torch::Tensor();
    parameter.set_data(parameter.to(after));
    auto& held = *optimizer.state().at(parameter.unsafeGetTensorImpl());
    if constexpr (std::is_base_of_v<torch::optim::AdamW, Optimizer>) {
      auto& moments = static_cast<torch::optim::AdamWParamState&>(held);
      moments.exp_avg(moments.exp_avg().to(state));
      moments.exp_avg_sq(moments.exp_avg_sq().to(state));
    } else {
      auto& momentum = static_cast<torch::optim::SGDParamState&>(held);
      momentum.momentum_buffer(momentum.momentum_buffer().to(state));
    }
    parameter.mutable_grad() = gradients[2].to(after);
    optimizer.step();
    return parameter.to(torch::kFloat);
  };
  const auto fused = run(std::type_identity<Fused>()), plain = run(std::type_identity<Plain>());
  EXPECT_TRUE(torch::allclose(fused, plain, 0x1p-6, 0x1p-6))
      << "off by " << (fused - plain).abs().max().template item<float>() << " with state of "
      << c10::toString(state) << " for " << c10::toString(after);
}

TEST(FusedOptimizers, StateOfAnotherTypeIsConverted) {
  using torch::kBFloat16, torch::kDouble, torch::kFloat, torch::kHalf;
  const auto sgd = SGDOptions(0.1).momentum(0.9);
  const auto adamw = AdamWOptions(0.1);
  for (const auto& [before, state, after] : {std::tuple{kHalf, kHalf, kBFloat16},
                                             {kBFloat16, kFloat, kBFloat16},
                                             {kFloat, kFloat, kBFloat16},
                                             {kHalf, kBFloat16, kHalf},
                                             {kFloat, kDouble, kFloat}}) {
    expect_goes_on_as<FusedSGD, torch::optim::SGD>(before, state, after, sgd);
    expect_goes_on_as<FusedAdamW, torch::optim::AdamW>(before, state, after, adamw);
  }
}

// A module's parameters() lists a shared weight under every name.
TEST(FusedOptimizers, DuplicateIsRefusedUpFront) {
  auto first = torch::ones({1}).requires_grad_(), tied = torch::ones({2}).requires_grad_();
  first.mutable_grad() = torch::ones({1});
  tied.mutable_grad() = torch::ones({2});
  const auto expect_refused = [&](torch::optim::Optimizer& optimizer) {
    try {
      optimizer.step();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), HasSubstr("is listed twice; give each once"));
    }
    EXPECT_TRUE(optimizer.state().empty());
    EXPECT_EQ(first.item<float>(), 1);
    EXPECT_TRUE(tied.equal(torch::ones({2})));
  };
  using Group = torch::optim::OptimizerParamGroup;
  for (const std::vector<Group>& groups :
       {std::vector{Group({first, tied, tied})}, {Group({first, tied}), Group({tied})}}) {
    FusedSGD sgd(groups, SGDOptions(0.1).momentum(0.9));
    expect_refused(sgd);
    FusedAdamW adamw(groups);
    expect_refused(adamw);
  }
}

// Without the check, the first group would be stepped before the error.
template <class Fused, class State, class Options>
void expect_refused_at_once(const Options& options, const std::function<void(State&)>& spoil) {
  auto first = torch::ones({1}).requires_grad_(), second = torch::ones({2, 3}).requires_grad_();
  using Group = torch::optim::OptimizerParamGroup;
  Fused fused({Group({first}), Group({second})}, options);
  first.mutable_grad() = torch::ones({1});
  second.mutable_grad() = torch::ones({2, 3});
  auto spoiled = std::make_unique<State>();
  spoil(*spoiled);
  fused.state()[second.unsafeGetTensorImpl()] = std::move(spoiled);
  try {
    fused.step();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(), HasSubstr("does not fit it"));
  }
  EXPECT_EQ(fused.state().size(), 1U);
  EXPECT_EQ(first.template item<float>(), 1);
}

TEST(FusedOptimizers, UnfitStateIsRefusedUpFront) {
  using SGDState = torch::optim::SGDParamState;
  using AdamWState = torch::optim::AdamWParamState;
  for (const auto& wrong : {torch::ones({7}), torch::ones({3}), torch::ones({2, 3}).to_sparse(),
                            torch::ones({2, 3}, torch::kInt)}) {
    expect_refused_at_once<FusedSGD, SGDState>(
        SGDOptions(0.1).momentum(0.9), [&](SGDState& state) { state.momentum_buffer(wrong); });
    expect_refused_at_once<FusedAdamW, AdamWState>(
        AdamWOptions(0.1), [&](AdamWState& state) { state.exp_avg(wrong); });
    expect_refused_at_once<FusedAdamW, AdamWState>(
        AdamWOptions(0.1), [&](AdamWState& state) { state.exp_avg_sq(wrong); });
    expect_refused_at_once<FusedAdamW, AdamWState>(
        AdamWOptions(0.1).amsgrad(true), [&](AdamWState& state) { state.max_exp_avg_sq(wrong); });
  }
}

// The second parameter's state lies on the meta device and has no values to read, so the step fails
// after it has made the first parameter's state.
template <class Fused, class Plain, class State, class Options>
void expect_unharmed_by_a_failed_step(const Options& options,
                                      const std::function<void(State&)>& spoil) {
  const auto make = [] {
    return Tensors{torch::ones({4}).requires_grad_(), torch::ones({2, 3}).requires_grad_()};
  };
  const Tensors fused_parameters = make(), plain_parameters = make();
  Fused fused(fused_parameters, options);
  Plain plain(plain_parameters, options);
  auto spoiled = std::make_unique<State>();
  spoil(*spoiled);
  fused.state()[fused_parameters[1].unsafeGetTensorImpl()] = std::move(spoiled);
  for (const auto& parameter : fused_parameters)
    parameter.mutable_grad() = torch::full_like(parameter, 5);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(fused.step(), std::exception);
  EXPECT_EQ(fused.state().count(fused_parameters[0].unsafeGetTensorImpl()), 0U);
  EXPECT_TRUE(fused_parameters[0].equal(torch::ones({4})));
  fused.state().erase(fused_parameters[1].unsafeGetTensorImpl());
  for (int step = 0; step < 3; ++step) {
    set_gradients(fused_parameters, step);
    set_gradients(plain_parameters, step);
    fused.step();
    plain.step();
    expect_close(fused_parameters, plain_parameters, step);
  }
}

TEST(FusedOptimizers, FailedStepLeavesNoUnfilledState) {
  using SGDState = torch::optim::SGDParamState;
  using AdamWState = torch::optim::AdamWParamState;
  expect_unharmed_by_a_failed_step<FusedSGD, torch::optim::SGD, SGDState>(
      SGDOptions(0.1).momentum(0.9), [](SGDState& state) {
        state.momentum_buffer(torch::ones({2, 3}, torch::kMeta));
      });
  expect_unharmed_by_a_failed_step<FusedAdamW, torch::optim::AdamW, AdamWState>(
      AdamWOptions(0.1), [](AdamWState& state) {
        state.exp_avg(torch::ones({2, 3}, torch::kMeta));
      });
}

// For a parameter that has state, a step is counted only after it has been taken.
TEST(FusedAdamW, FailedStepIsNotCounted) {
  const Tensors parameters = {torch::ones({4}).requires_grad_(),
                              torch::ones({2, 3}).requires_grad_()};
  FusedAdamW optimizer(parameters);
  for (const auto& parameter : parameters)
    parameter.mutable_grad() = torch::full_like(parameter, 5);
  optimizer.step();
  const auto state = [&](std::size_t i) -> torch::optim::AdamWParamState& {
    return static_cast<torch::optim::AdamWParamState&>(
        *optimizer.state().at(parameters[i].unsafeGetTensorImpl()));
  };
  state(1).exp_avg(torch::ones({2, 3}, torch::kMeta));
  const auto before = parameters[0].detach().clone();
  EXPECT_THROW(optimizer.step(), std::exception);
  EXPECT_EQ(state(0).step(), 1);
  EXPECT_TRUE(parameters[0].equal(before));
  state(1).exp_avg(torch::zeros({2, 3}));
  optimizer.step();
  EXPECT_EQ(state(0).step(), 2);
}

}  // namespace
}  // namespace weft::testing
