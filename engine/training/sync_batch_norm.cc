// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/training/agreement.h>
#include <weft/engine/training/sync_batch_norm.h>

namespace weft::training {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// All dimensions but that of the channels.
std::vector<std::int64_t> other_dimensions(const at::Tensor& input) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t i = 2; i < input.dim(); ++i) dimensions.push_back(i);
  return dimensions;
}

// A value of each channel, shaped to be multiplied with the input.
at::Tensor by_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.view(shape);
}

// The dtype of statistics: float16 and bfloat16 have too few digits for sums.
at::ScalarType dtype_of_sums(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Statistics {
  at::Tensor mean, variance;  // of all ranks, float64, by channel
  at::Tensor count;           // the values of each channel on all ranks
};

// Each rank sends the number of its values, their sum and the sum of their squares. In float64
// these lose no digit that a mean and a variance of float32 values need; the variance of a rank's
// own values is computed around their own mean.
Statistics over_all_ranks(const at::Tensor& input, const ProcessGroup& group) {
  const std::int64_t channels = input.size(1);
  const auto options = input.options().dtype(at::kDouble);
  at::Tensor sums = at::zeros({2 * channels + 1}, options);
  if (input.numel() > 0) {
    const std::int64_t values = input.numel() / channels;
    const auto [variance, mean] =
        at::var_mean(input.to(dtype_of_sums(input)), other_dimensions(input), std::int64_t{0});
    const at::Tensor wide = mean.to(at::kDouble);
    const at::Tensor squares = variance.to(at::kDouble) + wide * wide;
    const auto number = static_cast<double>(values);
    sums = at::cat({wide * number, squares * number, at::full({1}, number, options)});
  }
  const bool is_complete = shard::before_sum(group, sums);
  if (!is_complete && parallel::detail::JoinScope::is_without_some_ranks()) {
    throw Error(Blame::Caller,
                "SyncBatchNorm: some ranks have run out of inputs (weft::join) and do not add up "
                "statistics with this one; set JoinOptions::throw_on_early_termination, or use "
                "BatchNorm. In a sharded model they do, if it has the group of the SyncBatchNorm");
  }
  sums = reduced(sums, ReduceOp::Sum, group);
  Statistics all;
  all.count = sums[2 * channels];
  const at::Tensor divisor = all.count.clamp_min(1);  // no NaN if all ranks have empty batches
  all.mean = sums.narrow(0, 0, channels) / divisor;
  all.variance = (sums.narrow(0, channels, channels) / divisor - all.mean * all.mean).clamp_min(0);
  return all;
}

// As torch::nn::BatchNorm: the running variance is the unbiased one. Batches that are empty on all
// ranks leave it as it is.
void update_running(const Statistics& all, const BatchNormCall& call) {
  // Unseen by autograd, as batch_norm's own updates are: an earlier forward may have saved them.
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const at::Tensor factor =
      call.momentum * (all.count > 0).to(at::kDouble);  // on the device, without waiting for it
  const auto blend = [&](at::Tensor running, const at::Tensor& value) {
    if (!running.defined()) return;
    const at::Tensor before = running.to(at::kDouble);
    running.copy_(before + factor * (value - before));
  };
  blend(call.running_mean, all.mean);
  blend(call.running_var, all.variance * (all.count / (all.count - 1).clamp_min(1)));
}

class Normalise : public torch::autograd::Function<Normalise> {
 public:
  // Only the values of optional tensors become inputs of the node.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& given_weight,
                            const std::optional<at::Tensor>& given_bias, const BatchNormCall& call,
                            const ProcessGroup& group) {
    const group::CalledBy by("SyncBatchNorm");
    const at::Tensor weight = given_weight.value_or(at::Tensor());
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const Statistics all = over_all_ranks(input, group);
    update_running(all, call);
    const auto dtype = dtype_of_sums(input);
    const at::Tensor inverse = (all.variance + call.eps).rsqrt();
    const at::Tensor factor = weight.defined() ? inverse * weight.to(at::kDouble) : inverse;
    at::Tensor shift = -all.mean * factor;
    if (bias.defined()) shift = shift + bias.to(at::kDouble);
    context->save_for_backward({input, weight, all.mean.to(dtype), inverse.to(dtype), all.count});
    if (bias.defined())
      context->saved_data["bias_dtype"] = static_cast<std::int64_t>(bias.scalar_type());
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<HeldGroup>(group));
    return at::addcmul(by_channel(shift.to(dtype), input), input.to(dtype),
                       by_channel(factor.to(dtype), input))
        .to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (c10::GradMode::is_enabled()) {
      throw Error(Blame::Caller,
                  "SyncBatchNorm: backward(create_graph = true) is not there: the statistics of "
                  "other ranks are no part of this rank's graph");
    }
    const group::CalledBy by("SyncBatchNorm's backward");
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &inverse = saved[3];
    const auto dtype = dtype_of_sums(input);
    const std::int64_t channels = input.size(1);
    const auto capsule = context->saved_data["group"].toCapsule();
    const auto& group = static_cast<const HeldGroup&>(*capsule).group;

    // An empty batch has no gradient, which autograd may pass as one of zeros.
    const at::Tensor out = gradients[0].to(dtype);
    const at::Tensor centred = input.to(dtype) - by_channel(mean, input);
    const auto dimensions = other_dimensions(input);
    const at::Tensor sum = out.sum(dimensions);
    const at::Tensor sum_of_products = (out * centred).sum(dimensions);
    at::Tensor of_input, of_weight, of_bias;
    if (context->needs_input_grad(0)) {
      const at::Tensor both = at::cat({sum, sum_of_products});
      shard::before_sum(group, both);
      const at::Tensor sums = reduced(both, ReduceOp::Sum, group);
      const at::Tensor divisor = saved[4].clamp_min(1).to(dtype);
      const at::Tensor factor = weight.defined() ? inverse * weight.to(dtype) : inverse;
      const at::Tensor slope =
          sums.narrow(0, channels, channels) / divisor * inverse.square() * factor;
      of_input = at::addcmul(-by_channel(sums.narrow(0, 0, channels) / divisor * factor, input),
                             out, by_channel(factor, input))
                     .addcmul_(centred, by_channel(slope, input), -1)
                     .to(input.scalar_type());
    }
    std::size_t edge = 1;
    if (weight.defined() && context->needs_input_grad(edge++))
      of_weight = (sum_of_products * inverse).to(weight.scalar_type());
    const auto bias_dtype = context->saved_data.find("bias_dtype");
    if (bias_dtype != context->saved_data.end() && context->needs_input_grad(edge))
      of_bias = sum.to(static_cast<at::ScalarType>(bias_dtype->second.toInt()));
    return {of_input, of_weight, of_bias, at::Tensor(), at::Tensor()};
  }

 private:
  struct HeldGroup : torch::CustomClassHolder {
    explicit HeldGroup(ProcessGroup held) : group(std::move(held)) {}
    ProcessGroup group;
  };
};

}  // namespace

void check_batch_norm_group(const ProcessGroup& group) {
  if (!group)
    throw Error(Blame::Caller,
                "SyncBatchNorm: the group is empty; give the group of the model's ranks");
}

void check_batch_norm_input(const at::Tensor& input, std::int64_t features, int fewest, int most) {
  if (input.dim() >= fewest && input.dim() <= most && input.size(1) == features && features > 0)
    return;
  const std::string dimensions = fewest == most
                                     ? std::to_string(most)
                                     : std::to_string(fewest) + " or " + std::to_string(most);
  throw Error(Blame::Caller, "SyncBatchNorm: the input has the shape " + c10::str(input.sizes()) +
                                 "; it must have " + dimensions + " dimensions and " +
                                 std::to_string(features) + " channels in dimension 1");
}

at::Tensor synchronized_batch_norm(const at::Tensor& input, const BatchNormCall& call,
                                   const ProcessGroup& group) {
  if (!call.trains || !group || group.size() == 1) {
    return at::batch_norm(input, call.weight, call.bias, call.running_mean, call.running_var,
                          call.trains, call.momentum, call.eps, /*cudnn_enabled=*/true);
  }
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return Normalise::apply(input, given(call.weight), given(call.bias), call, group);
}

}  // namespace weft::training
