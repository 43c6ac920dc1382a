// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/shard_groups.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/training/agreement.h>
#include <weft/engine/training/clip_grad_norm.h>
#include <weft/engine/training/stand_ins.h>

namespace weft {

namespace {

// The gradients whose norms add up over the ranks of one group, or on this rank alone.
struct Part {
  ProcessGroup group;
  std::vector<at::Tensor> gradients;
};

std::vector<at::Tensor> all_of(const std::vector<Part>& parts) {
  std::vector<at::Tensor> all;
  for (const Part& part : parts)
    all.insert(all.end(), part.gradients.begin(), part.gradients.end());
  return all;
}

std::vector<at::Tensor>& gradients_over(std::vector<Part>& parts, const ProcessGroup& group) {
  for (Part& part : parts) {
    const bool is_it = group ? part.group && group::are_same(part.group, group) : !part.group;
    if (is_it) return part.gradients;
  }
  parts.push_back({group, {}});
  return parts.back().gradients;
}

// Sharded parameters count as a part also where this rank has no gradient, since other ranks may.
std::vector<Part> parts_of(const torch::nn::Module& model) {
  std::vector<Part> parts;
  std::unordered_set<const void*> seen;  // counts a weight that two modules share once
  for (const at::Tensor& parameter : model.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    std::vector<at::Tensor>& gradients = gradients_over(parts, group::shard_group_of(parameter));
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    training::require_averaged(parameter, "clip_grad_norm_");
    if (gradient.is_sparse()) {
      gradient = gradient.coalesce();  // the norm is that of the sums
      parameter.mutable_grad() = gradient;
      gradient = gradient._values();
    }
    if (gradient.numel() > 0) gradients.push_back(gradient);
  }
  return parts;
}

// The norm of a vector whose pieces have these norms.
at::Tensor norm_of_norms(const std::vector<at::Tensor>& norms, double norm_type,
                         c10::Device device) {
  std::vector<at::Tensor> here;
  for (const at::Tensor& norm : norms) here.push_back(norm.to(device));
  return at::linalg_vector_norm(at::stack(here), norm_type);
}

// The norm over all ranks of the group, on the device of `local`. Float64: powers of large norms do
// not overflow as early.
at::Tensor norm_over(const ProcessGroup& group, const at::Tensor& local, double norm_type) {
  const at::Tensor wide = local.to(at::kDouble);
  if (std::isinf(norm_type)) {
    // NaN travels on its own: which of NaN and a number is larger depends on the backend.
    const at::Tensor is_nan = wide.isnan().to(at::kDouble);
    const at::Tensor both =
        training::reduced(at::stack({is_nan, at::where(wide.isnan(), at::zeros_like(wide), wide)}),
                          ReduceOp::Max, group);
    return at::where(both[0] > 0, std::numeric_limits<double>::quiet_NaN(), both[1])
        .to(local.scalar_type());
  }
  return training::reduced(wide.pow(norm_type), ReduceOp::Sum, group)
      .pow(1.0 / norm_type)
      .to(local.scalar_type());
}

at::Tensor total_norm(const std::vector<Part>& parts, double norm_type, const ProcessGroup& over) {
  const std::vector<at::Tensor> all = all_of(parts);
  const auto device = all.empty() ? c10::Device(at::kCPU) : all.front().device();
  const at::Tensor zero = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  std::vector<at::Tensor> norms;
  for (const Part& part : parts) {
    std::vector<at::Tensor> some;
    if (!part.gradients.empty()) some = at::_foreach_norm(part.gradients, norm_type);
    if (part.group && part.group.size() > 1) {
      const at::Tensor local = some.empty() ? zero : norm_of_norms(some, norm_type, device);
      norms.push_back(norm_over(part.group, local, norm_type));
    } else {
      norms.insert(norms.end(), some.begin(), some.end());
    }
  }
  const at::Tensor total = norms.empty() ? zero : norm_of_norms(norms, norm_type, device);
  return over && over.size() > 1 ? norm_over(over, total, norm_type) : total;
}

void clip_elsewhere(const torch::nn::Module& model, double max_norm, double norm_type) {
  clip_grad_norm_(model, max_norm, norm_type);
}
// Ranks that have run out of inputs (weft::join) never call clip_grad_norm_ themselves.
[[maybe_unused]] const bool kIsMirrored = [] {
  shard::set_mirrored_clip(&clip_elsewhere);
  return true;
}();

void scale(const std::vector<at::Tensor>& gradients, const at::Tensor& factor) {
  std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> lists;
  for (const at::Tensor& gradient : gradients) {
    auto list = lists.begin();
    while (list != lists.end() && list->first != gradient.device()) ++list;
    if (list == lists.end()) list = lists.insert(list, {gradient.device(), {}});
    list->second.push_back(gradient);
  }
  for (auto& [device, list] : lists) at::_foreach_mul_(list, factor.to(device));
}

}  // namespace

at::Tensor clip_grad_norm_(const torch::nn::Module& model, double max_norm, double norm_type,
                           ProcessGroup over) {
  if (std::isnan(max_norm) || max_norm < 0) {
    throw Error(Blame::Caller, "clip_grad_norm_: max_norm is " + std::to_string(max_norm) +
                                   "; it must be a number of at least 0");
  }
  if (std::isnan(norm_type) || norm_type <= 0) {
    throw Error(Blame::Caller, "clip_grad_norm_: norm_type is " + std::to_string(norm_type) +
                                   "; it must be positive, or infinity for the largest value");
  }
  const c10::NoGradGuard no_grad;
  const std::vector<Part> parts = parts_of(model);
  shard::before_clip(model, max_norm, norm_type, static_cast<bool>(over));
  const group::CalledBy by("clip_grad_norm_");
  const at::Tensor total = total_norm(parts, norm_type, over);
  // A factor of 1 in place of a condition: the host does not wait for a GPU.
  scale(all_of(parts), (max_norm / (total + 1e-6)).clamp_max(1.0));
  shard::after_clip(model);
  return total;
}

}  // namespace weft
