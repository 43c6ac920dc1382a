// SPDX-License-Identifier: Apache-2.0
// Compares the optimizer steps with torch::optim, with gradients that change every step.

#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <weft/base/error.h>
#include <weft/kernels/kernels.h>

#include "tensors.h"

namespace weft::kernels {
namespace {

constexpr int kSteps = 25;

// Parameters of odd sizes, a copy of them for libtorch, and gradients. For 16-bit types libtorch's
// copies are fp32: libtorch rounds 16-bit tensors after every operation, while Weft and libtorch's
// own fused kernels compute in fp32. So the expected result is the fp32 one, rounded when stored.
struct Model {
  Model(Dtype of_parameters, Dtype of_gradients)
      : dtype(of_parameters), gradient_dtype(of_gradients) {
    is_16_bit = size_of(dtype) == 2;
    for (const std::int64_t elements : {1, 3, 64, 1000, 0, 257}) {
      parameters.push_back(at::randn({elements}, at::kDouble).to(scalar_type(dtype)));
      references.push_back(
          parameters.back().to(is_16_bit ? at::kFloat : scalar_type(dtype), false, true));
    }
  }

  // Draws new gradients, the same for both sides, except for parameters whose `skip` is true.
  void draw_gradients(bool maximize, const std::vector<bool>& skip) {
    gradients.assign(parameters.size(), {});
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      references[i].mutable_grad() = at::Tensor();
      if (skip[i]) continue;
      gradients[i] = at::randn(parameters[i].sizes(), at::kDouble).to(scalar_type(gradient_dtype));
      const at::Tensor reference = gradients[i].to(references[i].scalar_type(), false, true);
      references[i].mutable_grad() =
          maximize ? reference.neg() : reference;  // as in torch.optim; C++ has no such option
    }
  }

  // Rounds libtorch's copy as storing it in a 16-bit type would.
  void round(const at::Tensor& tensor) const {
    if (is_16_bit && tensor.defined()) tensor.copy_(tensor.to(scalar_type(dtype)));
  }

  // Allows the difference that fused multiply-adds make over kSteps steps; for 16-bit types, the
  // one that they make where a value lies at a rounding tie.
  void expect_equal() const {
    const double tolerance = dtype == Dtype::Float64 ? 1e-13 : dtype == Dtype::Float32 ? 2e-6 : 0;
    const double last_place = dtype == Dtype::Float16    ? 0x1p-10
                              : dtype == Dtype::BFloat16 ? 0x1p-7
                                                         : tolerance;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor actual = parameters[i].to(at::kDouble);
      const at::Tensor expected = references[i].to(at::kDouble);
      EXPECT_TRUE(actual.allclose(expected, 2 * last_place, last_place)) << "parameter " << i;
    }
  }

  Dtype dtype, gradient_dtype;
  bool is_16_bit;
  std::vector<at::Tensor> parameters, references, gradients;
};

std::vector<bool> skips(int step, std::size_t parameters, bool skipping) {
  std::vector<bool> result(parameters, false);
  if (skipping) result[1] = step % 3 == 0;  // also in the first step, so its state begins later
  if (skipping) result[3] = step % 4 == 2;
  return result;
}

void run_sgd(Dtype dtype, Dtype gradient_dtype, const SgdOptions& options, bool skipping = false) {
  Model model(dtype, gradient_dtype);
  torch::optim::SGD reference(model.references, torch::optim::SGDOptions(options.lr)
                                                    .momentum(options.momentum)
                                                    .dampening(options.dampening)
                                                    .weight_decay(options.weight_decay)
                                                    .nesterov(options.nesterov));
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& parameter : model.parameters) {
    buffers.push_back(at::zeros_like(parameter).fill_(
        std::numeric_limits<double>::quiet_NaN()));  // never read in step 1
  }
  std::vector<bool> stepped(buffers.size(), false);
  for (int step = 0; step < kSteps; ++step) {
    model.draw_gradients(options.maximize, skips(step, buffers.size(), skipping));
    std::vector<SgdTensor> tensors;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (!model.gradients[i].defined()) continue;
      tensors.push_back({slice_of(model.parameters[i]), slice_of(model.gradients[i]),
                         options.momentum == 0 ? Slice() : slice_of(buffers[i]), !stepped[i]});
      stepped[i] = true;
    }
    sgd_step(tensors, dtype, gradient_dtype, options);
    reference.step();
    for (const at::Tensor& parameter : model.references) {
      model.round(parameter);
      const auto state = reference.state().find(parameter.unsafeGetTensorImpl());
      if (state == reference.state().end()) continue;
      model.round(static_cast<torch::optim::SGDParamState&>(*state->second).momentum_buffer());
    }
  }
  model.expect_equal();
}

TEST(SgdStep, EqualsLibtorchForEveryOption) {
  const SgdOptions cases[] = {
      {.lr = 0.1},
      {.lr = 0.1, .weight_decay = 0.01},
      {.lr = 0.1, .momentum = 0.9},
      {.lr = 0.1, .momentum = 0.9, .dampening = 0.3},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
      {.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.05, .maximize = true},
      {.lr = 0.1, .maximize = true},
      {.lr = 1e-3, .momentum = 1, .weight_decay = 1, .nesterov = true},
  };
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    run_sgd(Dtype::Float64, Dtype::Float64, cases[i]);
    run_sgd(Dtype::Float32, Dtype::Float32, cases[i]);
  }
}

TEST(SgdStep, Takes16BitParametersAndGradients) {
  const SgdOptions options = {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true};
  run_sgd(Dtype::Float16, Dtype::Float16, options);
  run_sgd(Dtype::BFloat16, Dtype::BFloat16, options);
  run_sgd(Dtype::Float32, Dtype::Float16, options);
  run_sgd(Dtype::Float32, Dtype::BFloat16, options);
  run_sgd(Dtype::Float32, Dtype::Float16, {.lr = 0.05, .weight_decay = 0.1});
}

TEST(SgdStep, SkippedParametersKeepTheirState) {
  run_sgd(Dtype::Float64, Dtype::Float64,
          {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.01}, true);
}

// Makes libtorch's optimizer for the options: Adam where the decay is L2, AdamW where it is
// decoupled.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_adam(const std::vector<at::Tensor>& parameters,
                                                   const AdamWOptions& options) {
  return std::make_unique<Optimizer>(parameters, Options(options.lr)
                                                     .betas({options.beta1, options.beta2})
                                                     .eps(options.eps)
                                                     .weight_decay(options.weight_decay)
                                                     .amsgrad(options.amsgrad));
}

template <class State>
void round_state(const Model& model, torch::optim::OptimizerParamState& state) {
  auto& adam = static_cast<State&>(state);
  for (const at::Tensor& tensor : {adam.exp_avg(), adam.exp_avg_sq(), adam.max_exp_avg_sq()})
    model.round(tensor);
}

void run_adamw(Dtype dtype, Dtype gradient_dtype, const AdamWOptions& options,
               bool skipping = false) {
  Model model(dtype, gradient_dtype);
  const auto reference =
      options.decoupled_weight_decay
          ? make_adam<torch::optim::AdamW, torch::optim::AdamWOptions>(model.references, options)
          : make_adam<torch::optim::Adam, torch::optim::AdamOptions>(model.references, options);
  struct State {
    at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;
    std::int64_t step = 0;
  };
  std::vector<State> states;
  for (const at::Tensor& p : model.parameters)
    states.push_back({at::zeros_like(p), at::zeros_like(p), at::zeros_like(p)});
  for (int step = 0; step < kSteps; ++step) {
    model.draw_gradients(options.maximize, skips(step, states.size(), skipping));
    std::vector<AdamWTensor> tensors;
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (!model.gradients[i].defined()) continue;
      const Slice largest = options.amsgrad ? slice_of(states[i].max_exp_avg_sq) : Slice();
      tensors.push_back({slice_of(model.parameters[i]), slice_of(model.gradients[i]),
                         slice_of(states[i].exp_avg), slice_of(states[i].exp_avg_sq), largest,
                         ++states[i].step});
    }
    adamw_step(tensors, dtype, gradient_dtype, options);
    reference->step();
    for (const at::Tensor& parameter : model.references) {
      model.round(parameter);
      const auto state = reference->state().find(parameter.unsafeGetTensorImpl());
      if (state == reference->state().end()) continue;
      options.decoupled_weight_decay
          ? round_state<torch::optim::AdamWParamState>(model, *state->second)
          : round_state<torch::optim::AdamParamState>(model, *state->second);
    }
  }
  model.expect_equal();
}

TEST(AdamWStep, EqualsLibtorchForEveryOption) {
  const AdamWOptions cases[] = {
      {.lr = 0.01},
      {.lr = 0.01, .weight_decay = 0},
      {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-4, .weight_decay = 0.1},
      {.lr = 0.01, .weight_decay = 0.1, .amsgrad = true},
      {.lr = 0.01, .weight_decay = 0.1, .maximize = true},
      {.lr = 0.01, .weight_decay = 0.1, .decoupled_weight_decay = false},
      {.lr = 0.01,
       .weight_decay = 0.1,
       .amsgrad = true,
       .maximize = true,
       .decoupled_weight_decay = false},
  };
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    run_adamw(Dtype::Float64, Dtype::Float64, cases[i]);
    run_adamw(Dtype::Float32, Dtype::Float32, cases[i]);
  }
}

TEST(AdamWStep, Takes16BitParametersAndGradients) {
  const AdamWOptions options = {.lr = 0.01, .eps = 1e-4, .weight_decay = 0.1, .amsgrad = true};
  run_adamw(Dtype::Float16, Dtype::Float16, options);
  run_adamw(Dtype::BFloat16, Dtype::BFloat16, options);
  run_adamw(Dtype::Float32, Dtype::Float16, options);
  run_adamw(Dtype::Float32, Dtype::BFloat16, options);
  run_adamw(Dtype::Float32, Dtype::BFloat16, {.lr = 0.01});
}

TEST(AdamWStep, ParametersMayBeAtDifferentSteps) {
  run_adamw(Dtype::Float64, Dtype::Float64, {.lr = 0.01}, true);
}

TEST(OptimizerStep, TakesThousandsOfTensors) {
  const at::Tensor parameters = at::randn({5000}, at::kFloat);
  const at::Tensor gradients = at::randn({5000}, at::kFloat);
  const at::Tensor expected = parameters - gradients * 0.5;
  std::vector<SgdTensor> tensors;
  for (std::size_t i = 0; i < 5000; ++i) {
    tensors.push_back({slice_of(parameters).part(i * 4, 4), slice_of(gradients).part(i * 4, 4)});
  }
  sgd_step(tensors, Dtype::Float32, Dtype::Float32, {.lr = 0.5});
  expect_same(parameters, expected);
}

class OptimizerRefuses : public testing::Test {
 protected:
  template <class Call>
  std::string refusal(Call call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    }
    return "";
  }
  at::Tensor values_ = at::zeros({4}, at::kFloat);
  Slice slice_ = slice_of(values_);
};

TEST_F(OptimizerRefuses, OptionsThatTorchRefuses) {
  const auto with = [&](const SgdOptions& options) {
    return refusal([&] { sgd_step({}, Dtype::Float32, Dtype::Float32, options); });
  };
  EXPECT_THAT(with({.nesterov = true}), testing::HasSubstr("Nesterov"));
  EXPECT_THAT(with({.momentum = 0.9, .dampening = 0.1, .nesterov = true}),
              testing::HasSubstr("Nesterov"));
}

TEST_F(OptimizerRefuses, MissingOrUnequalState) {
  const SgdTensor no_buffer = {slice_, slice_, {}};
  EXPECT_THAT(
      refusal([&] {
        sgd_step({&no_buffer, 1}, Dtype::Float32, Dtype::Float32, {.momentum = 0.9});
      }),
      testing::HasSubstr("sgd_step: momentum buffer 0 has 0 elements of float32; 4 are needed"));
  const AdamWTensor short_state = {slice_, slice_, slice_, slice_.part(0, 8), {}};
  EXPECT_THAT(refusal([&] {
                adamw_step({&short_state, 1}, Dtype::Float32, Dtype::Float32, {});
              }),
              testing::HasSubstr("exp_avg_sq 0 has 2 elements"));
  const AdamWTensor step_zero = {slice_, slice_, slice_, slice_, {}, 0};
  EXPECT_THAT(refusal([&] {
                adamw_step({&step_zero, 1}, Dtype::Float32, Dtype::Float32, {});
              }),
              testing::HasSubstr("step of parameter 0"));
}

TEST_F(OptimizerRefuses, UnsupportedTypes) {
  EXPECT_THAT(refusal([&] { sgd_step({}, Dtype::Float16, Dtype::Float32, {}); }),
              testing::HasSubstr("parameters of float16 with gradients of float32"));
  EXPECT_THAT(refusal([&] { adamw_step({}, Dtype::Int32, Dtype::Int32, {}); }),
              testing::HasSubstr("int32"));
}

}  // namespace
}  // namespace weft::kernels
