// SPDX-License-Identifier: Apache-2.0
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <weft/base/error.h>
#include <weft/engine/optim/cuda_steps.h>
#include <weft/engine/optim/fused.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/kernels/kernels.h>

namespace weft {

namespace {

using tensor::slice_of;
using torch::optim::OptimizerParamGroup;

// Called before any parameter changes, so that a step does not fail halfway.
void check_fits(const char* name, const char* plain, const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  const auto refuse = [&](Blame blame, const std::string& why) {
    throw Error(blame, std::string(name) + ": " + why + " (" + tensor::describe(parameter) +
                           "); use torch::optim::" + plain);
  };
  if (!parameter.is_cpu() && !parameter.is_cuda())
    refuse(Blame::Unsupported, "it steps parameters on the CPU and on GPUs");
  if (gradient.device() != parameter.device())
    refuse(Blame::Caller, "a gradient lies on " + gradient.device().str());
  if (gradient.layout() != at::kStrided) refuse(Blame::Caller, "a gradient is sparse");
  const auto fits = [](at::ScalarType type) {
    return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
  };
  if (!fits(parameter.scalar_type())) refuse(Blame::Caller, "it steps fp16, bf16, fp32 and fp64");
  if (gradient.scalar_type() != parameter.scalar_type())
    refuse(Blame::Caller, "a gradient has another dtype");
  if (gradient.sizes() != parameter.sizes()) refuse(Blame::Caller, "a gradient has another shape");
  if (!parameter.is_non_overlapping_and_dense())
    refuse(Blame::Caller, "a parameter has gaps or overlaps in memory");
}

// A state is the optimizer's own, or comes from a file, or was made for an earlier form of the
// parameter. libtorch also throws for these, but only when it reaches them.
void check_state(const char* name, const at::Tensor& parameter, const char* what,
                 const at::Tensor& state) {
  if (!state.defined()) return;
  const bool fits = state.layout() == at::kStrided && at::isFloatingType(state.scalar_type());
  if (fits && state.sizes() == parameter.sizes()) return;
  throw Error(Blame::Caller, std::string(name) + ": a parameter's " + what + " does not fit it: " +
                                 tensor::describe(state) + " for " + tensor::describe(parameter) +
                                 "; load the state of the same model, or erase it from state()");
}

// Checks all parameters and prepares their GPUs. `each_of(group, state, visit)` calls visit(name,
// tensor) for each tensor that a step reads of a parameter's state. `why_once(group, parameter)`
// returns the reason why the next step cannot be repeated as it is, or null.
template <class States, class EachOf, class WhyOnce>
void check_all_fit(const char* name, const char* plain,
                   const std::vector<OptimizerParamGroup>& groups, const States& states,
                   std::shared_ptr<optim::CudaSteps>& cuda, const EachOf& each_of,
                   const WhyOnce& why_once) {
  std::map<int, const char*> gpus;  // with a parameter's why_once there
  std::unordered_set<const c10::TensorImpl*> known;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_fits(name, plain, parameter);
      // libtorch would step it twice in succession; in one launch the two steps would overwrite
      // each other.
      if (!known.insert(parameter.unsafeGetTensorImpl()).second) {
        throw Error(Blame::Caller, std::string(name) + ": a parameter (" +
                                       tensor::describe(parameter) +
                                       ") is listed twice; give each once (a module's parameters() "
                                       "lists a weight that its parts share under every name)");
      }
      const auto held = states.find(parameter.unsafeGetTensorImpl());
      if (held != states.end()) {
        each_of(group, *held->second, [&](const char* what, const at::Tensor& state) {
          check_state(name, parameter, what, state);
        });
      }
      if (!parameter.is_cuda()) continue;
      const char*& why = gpus[static_cast<int>(parameter.get_device())];
      if (why == nullptr) why = why_once(group, parameter);
    }
  }
  if (!gpus.empty() && !cuda) cuda = std::make_shared<optim::CudaSteps>();
  for (const auto& [gpu, why] : gpus) cuda->prepare(gpu, name, why);
}

// The tensors of one launch and its changes of the state. These are made after the launch: if the
// launch or its memory allocation fails, no buffer without values remains, and no step is counted
// that was not taken.
template <class T, class State>
struct Launch {
  std::vector<T> tensors;
  std::vector<std::pair<c10::TensorImpl*, std::unique_ptr<State>>> made;
  std::vector<std::pair<c10::TensorImpl*, State*>> counted;
};

// Device (-1: the CPU), type, and the step that the tensors of one launch have in common.
struct LaunchKey {
  int device;
  at::ScalarType type;
  std::int64_t step;
  auto operator<=>(const LaunchKey&) const = default;
};
// Groups tensors into launches. On a GPU each is exactly one kernel launch, which fails or succeeds
// as a whole.
template <class T, class State>
class Launches {
 public:
  Launch<T, State>& of(const at::Tensor& parameter, std::int64_t step) {
    auto& all = launches_[{parameter.is_cuda() ? static_cast<int>(parameter.get_device()) : -1,
                           parameter.scalar_type(), step}];
    if (all.empty() || all.back().tensors.size() == optim::CudaSteps::kTensorsOfALaunch)
      all.emplace_back();
    return all.back();
  }
  // Calls run(device, type, launch) for each launch.
  template <class F>
  void each(const F& run) {
    for (auto& [key, all] : launches_) {
      for (auto& launch : all) run(key.device, tensor::dtype_of(key.type), launch);
    }
  }

 private:
  std::map<LaunchKey, std::deque<Launch<T, State>>> launches_;
};

// True if `tensor` has the parameter's type, device and strides.
bool is_laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor) {
  return tensor.scalar_type() == parameter.scalar_type() && tensor.device() == parameter.device() &&
         tensor.strides() == parameter.strides() && !tensor.is_neg();
}

// The tensor as the kernels take it: itself if it is laid out so, otherwise a copy. State has
// another type or device after it was loaded from a file, or after module->to() changed the
// parameter.
at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor) {
  return is_laid_out_like(parameter, tensor) ? tensor : at::empty_like(parameter).copy_(tensor);
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const c10::AutoGradMode with_grad(true);
  return closure();
}

}  // namespace

at::Tensor FusedSGD::step(LossClosure closure) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor loss = loss_of(closure);
  const auto has_momentum = [](const OptimizerParamGroup& group) {
    return static_cast<const torch::optim::SGDOptions&>(group.options()).momentum() != 0;
  };
  const auto each_of = [&](const OptimizerParamGroup& group,
                           torch::optim::OptimizerParamState& state, const auto& visit) {
    if (has_momentum(group))
      visit("momentum", static_cast<torch::optim::SGDParamState&>(state).momentum_buffer());
  };
  const auto why_once = [&](const OptimizerParamGroup& group,
                            const at::Tensor& parameter) -> const char* {
    if (!has_momentum(group)) return nullptr;
    const auto held = state_.find(parameter.unsafeGetTensorImpl());
    if (held != state_.end()) {
      const auto& momentum =
          static_cast<torch::optim::SGDParamState&>(*held->second).momentum_buffer();
      if (momentum.defined() && is_laid_out_like(parameter, momentum)) return nullptr;
    }
    return "its first step makes the momentum; step once before the capture";
  };
  check_all_fit("FusedSGD", "SGD", param_groups_, state_, cuda_, each_of, why_once);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    using State = torch::optim::SGDParamState;
    Launches<kernels::SgdTensor, State> launches;
    std::vector<at::Tensor> kept;  // keeps the memory of the slices below alive
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      kept.push_back(laid_out_like(parameter, parameter.grad()));
      kernels::SgdTensor one{slice_of(parameter), slice_of(kept.back()), {}, false};
      const auto held = state_.find(parameter.unsafeGetTensorImpl());
      auto* state = held == state_.end() ? nullptr : static_cast<State*>(held->second.get());
      one.first_step =
          options.momentum() != 0 && (state == nullptr || !state->momentum_buffer().defined());
      auto& launch = launches.of(parameter, one.first_step ? 1 : 0);
      if (options.momentum() != 0) {
        if (one.first_step) {
          state =
              launch.made.emplace_back(parameter.unsafeGetTensorImpl(), std::make_unique<State>())
                  .second.get();
          state->momentum_buffer(at::empty_like(parameter));
        } else {
          state->momentum_buffer(laid_out_like(parameter, state->momentum_buffer()));
        }
        one.momentum_buffer = slice_of(state->momentum_buffer());
      }
      launch.tensors.push_back(one);
    }
    const kernels::SgdOptions how{.lr = options.lr(),
                                  .momentum = options.momentum(),
                                  .dampening = options.dampening(),
                                  .weight_decay = options.weight_decay(),
                                  .nesterov = options.nesterov()};
    launches.each([&](int device, Dtype dtype, auto& launch) {
      device < 0 ? kernels::sgd_step(launch.tensors, dtype, dtype, how)
                 : cuda_->sgd(device, launch.tensors, dtype, how);
      for (auto& [parameter, state] : launch.made) state_[parameter] = std::move(state);
    });
  }
  return loss;
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor loss = loss_of(closure);
  const auto why_once = [](const OptimizerParamGroup&, const at::Tensor&) {
    return "it counts its steps on the host, so every launch of the graph would repeat one step; "
           "leave it out of the capture, and step after each launch";
  };
  const auto each_of = [](const OptimizerParamGroup& group,
                          torch::optim::OptimizerParamState& state, const auto& visit) {
    auto& of = static_cast<torch::optim::AdamWParamState&>(state);
    visit("exp_avg", of.exp_avg());
    visit("exp_avg_sq", of.exp_avg_sq());
    if (static_cast<const torch::optim::AdamWOptions&>(group.options()).amsgrad())
      visit("max_exp_avg_sq", of.max_exp_avg_sq());
  };
  check_all_fit("FusedAdamW", "AdamW", param_groups_, state_, cuda_, each_of, why_once);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    using State = torch::optim::AdamWParamState;
    Launches<kernels::AdamWTensor, State> launches;
    std::vector<at::Tensor> kept;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      c10::TensorImpl* const key = parameter.unsafeGetTensorImpl();
      const auto held = state_.find(key);
      auto* state = held == state_.end() ? nullptr : static_cast<State*>(held->second.get());
      const std::int64_t step = state == nullptr ? 1 : state->step() + 1;
      auto& launch = launches.of(parameter, step);
      if (state == nullptr)
        state = launch.made.emplace_back(key, std::make_unique<State>()).second.get();
      const auto ready = [&](at::Tensor& moment) {
        moment = moment.defined() ? laid_out_like(parameter, moment) : at::zeros_like(parameter);
        return slice_of(moment);
      };
      kept.push_back(laid_out_like(parameter, parameter.grad()));
      kernels::AdamWTensor one{slice_of(parameter),
                               slice_of(kept.back()),
                               ready(state->exp_avg()),
                               ready(state->exp_avg_sq()),
                               {},
                               step};
      if (options.amsgrad()) one.max_exp_avg_sq = ready(state->max_exp_avg_sq());
      launch.counted.emplace_back(key, state);
      launch.tensors.push_back(one);
    }
    const kernels::AdamWOptions how{.lr = options.lr(),
                                    .beta1 = std::get<0>(options.betas()),
                                    .beta2 = std::get<1>(options.betas()),
                                    .eps = options.eps(),
                                    .weight_decay = options.weight_decay(),
                                    .amsgrad = options.amsgrad()};
    launches.each([&](int device, Dtype dtype, auto& launch) {
      device < 0 ? kernels::adamw_step(launch.tensors, dtype, dtype, how)
                 : cuda_->adamw(device, launch.tensors, dtype, how);
      for (const auto& [parameter, state] : launch.counted) {
        state->step(state->step() + 1);
        // The launch wrote without autograd, so values that a graph has saved are no longer valid.
        // (libtorch's SGD hides that, and so does FusedSGD.)
        parameter->bump_version();
      }
      for (auto& [parameter, state] : launch.made) state_[parameter] = std::move(state);
    });
  }
  return loss;
}

}  // namespace weft
