// SPDX-License-Identifier: Apache-2.0
// GradScaler: multiplies the loss, so that small gradients do not vanish in float16, and divides
// the gradients before the optimizer uses them. A step whose gradients are not finite is left out,
// and the scale is then reduced. Semantics of torch.amp.GradScaler.
//
//   weft::GradScaler scaler;
//   …
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                 // only if gradients are clipped
//   weft::clip_grad_norm_(*model, 1.0);
//   scaler.step(optimizer);                     // leaves the step out if a gradient is inf or NaN
//   scaler.update();
//
// All ranks leave out the same steps. Gradients that DistributedDataParallel has averaged are the
// same on all ranks, so each rank decides by itself. Where ranks have different gradients, they
// agree by a small all_reduce in unscale_() or step(), which all of them call: ranks of a sharded
// model and of a ZeroRedundancyOptimizer do so by themselves; ranks that hold different parameters,
// as the stages of a pipeline do, are named by `over`.
//
// It is a part of a checkpoint: {"scaler", scaler}. Used by one thread at a time. Like PyTorch's,
// step() waits for the GPU.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace weft {

// Options of GradScaler, the same on all ranks.
struct GradScalerOptions {
  // The scale at the beginning.
  double init_scale = 65536;
  // The scale is multiplied by this after growth_interval steps without inf and NaN; above 1.
  double growth_factor = 2;
  // The scale is multiplied by this after a step with inf or NaN; between 0 and 1.
  double backoff_factor = 0.5;
  // See growth_factor.
  int growth_interval = 2000;
  // With false, scale() returns its argument, step() calls the optimizer, and all else does
  // nothing.
  bool enabled = true;
};

class WEFT_API GradScaler {
 public:
  // `over`: see above. Throws Caller for options outside of their ranges.
  explicit GradScaler(GradScalerOptions options = {}, ProcessGroup over = {});

  // Returns the tensor, mostly a loss, multiplied by the scale.
  at::Tensor scale(const at::Tensor& output);
  // The same for several tensors.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  // Divides the gradients of the optimizer's parameters by the scale; step() does so otherwise.
  // Throws Caller if it has been called for this optimizer since the last update(), after step(),
  // if nothing was scaled before, and for float16 gradients, whose parameters should be float32.
  void unscale_(torch::optim::Optimizer& optimizer);
  // Calls optimizer.step() unless a gradient is inf or NaN. Returns true if it has called it.
  // Throws Caller if it has been called for this optimizer since the last update(), and if none of
  // the optimizer's parameters has a gradient.
  bool step(torch::optim::Optimizer& optimizer);
  // Called once after the steps of all optimizers. Adapts the scale, or sets it to `new_scale`.
  void update(std::optional<double> new_scale = {});

  // The scale; 1 if the scaler is not enabled. Waits for the GPU.
  double get_scale() const;
  // As the options say; loading a checkpoint replaces them by those of the file.
  double get_growth_factor() const;
  // The same.
  double get_backoff_factor() const;
  // The same.
  int get_growth_interval() const;
  // As the options say.
  bool is_enabled() const { return enabled_; }

  // For Weft's own use.
  // What a checkpoint holds: the scale, the steps since it last changed, and the options.
  std::vector<at::Tensor>& checkpoint_state() { return state_; }

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct PerOptimizer {
    Stage stage = Stage::Ready;
    at::Tensor found_inf;  // on the device of the scale: 0, or 1 if a gradient is not finite
    bool has_gradients = false;
  };
  at::Tensor& scale_tensor() { return state_[0]; }
  void require_scaled(const char* called) const;
  PerOptimizer& unscale(torch::optim::Optimizer& optimizer);

  const bool enabled_;
  ProcessGroup over_;
  bool has_scaled_ = false;
  // The scale (float32), the steps since it last changed (int32), and in host memory the growth
  // factor, the backoff factor and the growth interval (float64).
  std::vector<at::Tensor> state_;
  std::unordered_map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;
};

}  // namespace weft
