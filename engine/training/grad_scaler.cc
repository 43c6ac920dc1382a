// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <map>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/shard_groups.h>
#include <weft/engine/training/agreement.h>
#include <weft/engine/training/grad_scaler.h>
#include <weft/engine/training/stand_ins.h>
#include <weft/engine/zero/zero.h>

namespace weft {

namespace {

using torch::optim::Optimizer;

void check(const GradScalerOptions& options) {
  const auto refuse = [](const std::string& what) {
    throw Error(Blame::Caller, "GradScaler: " + what);
  };
  if (!std::isfinite(options.init_scale) || options.init_scale <= 0)
    refuse("init_scale is " + std::to_string(options.init_scale) +
           "; it must be positive and finite");
  if (!std::isfinite(options.growth_factor) || options.growth_factor <= 1)
    refuse("growth_factor is " + std::to_string(options.growth_factor) + "; it must be above 1");
  if (!(options.backoff_factor > 0 && options.backoff_factor < 1))
    refuse("backoff_factor is " + std::to_string(options.backoff_factor) +
           "; it must be between 0 and 1");
  if (options.growth_interval < 1)
    refuse("growth_interval is " + std::to_string(options.growth_interval) +
           "; it must be at least 1");
}

// The groups whose ranks leave out this optimizer's step together.
std::vector<ProcessGroup> groups_of(const Optimizer& optimizer, const ProcessGroup& over) {
  std::vector<ProcessGroup> groups;
  training::add_group(groups, over);
  const auto refuse_join = [](const char* parts) {
    if (!parallel::detail::JoinScope::is_on_this_thread()) return;
    throw Error(Blame::Caller,
                "GradScaler: ranks that have run out of inputs (weft::join) do not "
                "decide with the others whether to step their " +
                    std::string(parts) +
                    "; leave out the GradScaler (bfloat16 needs none) or the join");
  };
  if (const auto* const zero = dynamic_cast<const parallel::ShardedOptimizer*>(&optimizer)) {
    refuse_join("shards of a ZeroRedundancyOptimizer");
    training::add_group(groups, zero->group_of_steps());
  }
  for (const auto& parameters : optimizer.param_groups()) {
    for (const at::Tensor& parameter : parameters.params()) {
      const ProcessGroup shards = group::shard_group_of(parameter);
      if (shards) refuse_join("rows of a sharded model");
      training::add_group(groups, shards);
      training::add_group(groups, group::replica_group_of(parameter));
    }
  }
  return groups;
}

using Gradients =
    std::map<std::pair<c10::Device, c10::ScalarType>, std::vector<at::Tensor>,
             decltype([](const auto& one, const auto& other) {
               const auto key = [](const auto& place) {
                 return std::tuple(place.first.type(), place.first.index(), place.second);
               };
               return key(one) < key(other);
             })>;

// The gradients' values by device and dtype. libtorch's operator takes lists of one of each.
Gradients gradients_of(const Optimizer& optimizer) {
  Gradients lists;
  for (const auto& parameters : optimizer.param_groups()) {
    for (const at::Tensor& parameter : parameters.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      training::require_averaged(parameter, "GradScaler");
      if (gradient.scalar_type() == at::kHalf) {
        throw Error(Blame::Caller,
                    "GradScaler: attempting to unscale float16 gradients, whose range is what "
                    "scaling works around; keep the parameters in float32 and compute in float16 "
                    "by AutocastGuard");
      }
      if (gradient.is_sparse()) {
        // Equal indices are summed first, since the sum may be infinite where no entry is.
        gradient = gradient.coalesce();
        parameter.mutable_grad() = gradient;
        gradient = gradient._values();
      }
      lists[{gradient.device(), gradient.scalar_type()}].push_back(gradient);
    }
  }
  return lists;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options, ProcessGroup over)
    : enabled_(options.enabled), over_(std::move(over)) {
  check(options);
  state_ = {at::full({}, options.init_scale, at::kFloat), at::zeros({}, at::kInt),
            at::tensor({options.growth_factor, options.backoff_factor,
                        static_cast<double>(options.growth_interval)},
                       at::kDouble)};
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!enabled_) return output;
  if (!has_scaled_ && scale_tensor().device() != output.device()) {
    state_[0] = state_[0].to(output.device());
    state_[1] = state_[1].to(output.device());
  }
  has_scaled_ = true;
  return output * scale_tensor().to(output.device(), /*non_blocking=*/true);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::require_scaled(const char* called) const {
  if (has_scaled_) return;
  throw Error(Blame::Caller, std::string("GradScaler: ") + called +
                                 "() is called before scale(); call scaler.scale(loss).backward()");
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) return;
  require_scaled("unscale_");
  const auto found = optimizers_.find(&optimizer);
  if (found != optimizers_.end() && found->second.stage == Stage::Unscaled) {
    throw Error(Blame::Caller,
                "GradScaler: unscale_() has already been called on this optimizer since the last "
                "update(); call it once in each step");
  }
  if (found != optimizers_.end() && found->second.stage == Stage::Stepped) {
    throw Error(Blame::Caller,
                "GradScaler: unscale_() is being called after step(); call update() after the "
                "steps of all optimizers");
  }
  unscale(optimizer);
}

GradScaler::PerOptimizer& GradScaler::unscale(Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  const group::CalledBy by("GradScaler");
  const std::vector<ProcessGroup> groups = groups_of(optimizer, over_);
  PerOptimizer unscaled;
  unscaled.stage = Stage::Unscaled;
  unscaled.has_gradients = !groups.empty();  // other ranks may have some
  unscaled.found_inf = at::zeros({}, scale_tensor().options());
  const at::Tensor inverse = scale_tensor().to(at::kDouble).reciprocal().to(at::kFloat);
  for (auto& [place, gradients] : gradients_of(optimizer)) {
    at::Tensor found = at::zeros({}, at::TensorOptions(at::kFloat).device(place.first));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(place.first));
    unscaled.found_inf = unscaled.found_inf.maximum(found.to(unscaled.found_inf.device()));
    unscaled.has_gradients = true;
  }
  for (const ProcessGroup& group : groups)
    unscaled.found_inf = training::reduced(unscaled.found_inf, ReduceOp::Max, group);
  return optimizers_[&optimizer] = std::move(unscaled);
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return true;
  }
  require_scaled("step");
  const auto found = optimizers_.find(&optimizer);
  if (found != optimizers_.end() && found->second.stage == Stage::Stepped) {
    throw Error(Blame::Caller,
                "GradScaler: step() has already been called on this optimizer since the last "
                "update(); call update() after the steps of all optimizers");
  }
  PerOptimizer& state = found != optimizers_.end() ? found->second : unscale(optimizer);
  if (!state.has_gradients) {
    throw Error(Blame::Caller,
                "GradScaler: step() is called for an optimizer none of whose parameters has a "
                "gradient; call backward() on a scaled loss that depends on them");
  }
  const bool steps = state.found_inf.item<float>() == 0;
  if (steps) optimizer.step();
  state.stage = Stage::Stepped;
  return steps;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled_) return;
  require_scaled("update");
  const c10::NoGradGuard no_grad;
  if (new_scale) {
    if (!std::isfinite(*new_scale) || *new_scale <= 0) {
      throw Error(Blame::Caller, "GradScaler: update(" + std::to_string(*new_scale) +
                                     "): a scale must be positive and finite");
    }
    scale_tensor().fill_(*new_scale);
  } else {
    at::Tensor found_inf = at::zeros({}, scale_tensor().options());
    bool has_checked = false;
    for (const auto& [optimizer, state] : optimizers_) {
      found_inf = found_inf + state.found_inf;
      has_checked = has_checked || state.has_gradients;
    }
    if (!has_checked) {
      throw Error(
          Blame::Caller,
          "GradScaler: update() is called before step(optimizer) or unscale_(optimizer), so it "
          "is not known whether gradients are finite; call scaler.step(optimizer) in place "
          "of optimizer.step()");
    }
    at::_amp_update_scale_(scale_tensor(), state_[1], found_inf, get_growth_factor(),
                           get_backoff_factor(), get_growth_interval());
  }
  optimizers_.clear();
}

double GradScaler::get_scale() const { return enabled_ ? state_[0].item<double>() : 1.0; }
double GradScaler::get_growth_factor() const { return state_[2][0].item<double>(); }
double GradScaler::get_backoff_factor() const { return state_[2][1].item<double>(); }
int GradScaler::get_growth_interval() const {
  return static_cast<int>(state_[2][2].item<double>());
}

}  // namespace weft
