// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks: SyncBatchNorm1d, SyncBatchNorm2d and
// SyncBatchNorm3d are the layers, convert_sync_batch_norm() changes the layers of a model that has
// been written for one device. Semantics of torch.nn.SyncBatchNorm, also in host memory.
//
//   weft::convert_sync_batch_norm(*model, group);
//   weft::DistributedDataParallel ddp(model, group);
//
// In training, output and gradients are those of one process with the batches of all ranks, which
// may differ in size and be empty. Forward makes one all_reduce of the statistics and backward
// makes another one, both over the layer's group, so all ranks run both. A layer in eval() mode
// communicates with nobody.
//
// All ranks issue these all_reduces, and the others of the group, in the same order. Ranks that use
// different parts of a model in one step need a group of their own for its layers
// (group.new_group(…)), since DistributedDataParallel then sends its buckets in another order.
// backward(create_graph = true) through a layer throws Caller.
#pragma once

#include <cstddef>

#include <torch/nn/modules/batchnorm.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

namespace training {

// The values and switches of one layer, in one forward.
struct BatchNormCall {
  at::Tensor weight, bias;               // undefined: 1 and 0
  at::Tensor running_mean, running_var;  // undefined: not tracked
  bool trains = false;                   // false: normalises by the running statistics
  double momentum = 0.1;
  double eps = 1e-5;
};
// For Weft's own use.
// Normalises by the statistics of all ranks' inputs, and updates the running statistics.
WEFT_API at::Tensor synchronized_batch_norm(const at::Tensor& input, const BatchNormCall& call,
                                            const ProcessGroup& group);
// Throws Caller unless the input has one of these numbers of dimensions, and channels.
WEFT_API void check_batch_norm_input(const at::Tensor& input, std::int64_t features, int fewest,
                                     int most);
WEFT_API void check_batch_norm_group(const ProcessGroup& group);

// What the three layers share.
template <std::size_t D, class Derived>
class SyncBatchNormLayer : public torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions> {
 public:
  // The layer of one rank; all ranks of the group make one with the same options.
  SyncBatchNormLayer(const torch::nn::BatchNormOptions& options, ProcessGroup group)
      : torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>(options),
        group_(std::move(group)) {
    check_batch_norm_group(group_);
  }

  // In training it is called by all ranks of the group.
  at::Tensor forward(const at::Tensor& input) {
    _check_input_dim(input);
    const auto& options = this->options;
    BatchNormCall call{this->weight, this->bias, this->running_mean, this->running_var};
    call.trains = this->is_training() || !options.track_running_stats();
    call.momentum = options.momentum().value_or(0.0);
    call.eps = options.eps();
    if (this->is_training() && this->num_batches_tracked.defined()) {
      this->num_batches_tracked += 1;
      if (!options.momentum())
        call.momentum = 1.0 / this->num_batches_tracked.template item<double>();
    }
    return synchronized_batch_norm(input, call, this->is_training() ? group_ : ProcessGroup());
  }

  // Prints the layer and its options.
  void pretty_print(std::ostream& stream) const override {
    stream << "weft::SyncBatchNorm" << D << "d(" << this->options.num_features()
           << ", eps=" << this->options.eps() << ", ranks=" << group_.size() << ")";
  }

 protected:
  // For Weft's own use.
  void _check_input_dim(const at::Tensor& input) override {
    check_batch_norm_input(input, this->options.num_features(),
                           D == 1 ? 2 : static_cast<int>(D) + 2, static_cast<int>(D) + 2);
  }

 private:
  ProcessGroup group_;
};

}  // namespace training

// Batch normalisation of inputs of 2 or 3 dimensions, over the ranks of a group.
class WEFT_API SyncBatchNorm1dImpl final
    : public training::SyncBatchNormLayer<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormLayer::SyncBatchNormLayer;
};
// The holder: SyncBatchNorm1d layer(torch::nn::BatchNormOptions(8), group).
TORCH_MODULE(SyncBatchNorm1d);

// The same for inputs of 4 dimensions.
class WEFT_API SyncBatchNorm2dImpl final
    : public training::SyncBatchNormLayer<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormLayer::SyncBatchNormLayer;
};
// Its holder.
TORCH_MODULE(SyncBatchNorm2d);

// The same for inputs of 5 dimensions.
class WEFT_API SyncBatchNorm3dImpl final
    : public training::SyncBatchNormLayer<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormLayer::SyncBatchNormLayer;
};
// Its holder.
TORCH_MODULE(SyncBatchNorm3d);

// Makes every torch::nn::BatchNorm1d, 2d and 3d of the module, and the module itself if it is one,
// normalise over the ranks of the group in training. In place: the model's classes, members, names
// and values stay, so it is called before or after an optimizer or a wrapper is made. module.to()
// keeps it; a clone() is not converted. Called by all ranks; returns how many layers it has
// changed, and may be called again with another group. A rank whose own batch has one value for
// each channel is refused by torch::nn::BatchNorm, before Weft sees it. Throws Caller for a layer
// that has neither running statistics nor a weight, and for an empty group; Unsupported if another
// library of the process has taken the dispatch key that it needs.
WEFT_API int convert_sync_batch_norm(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace weft
