// SPDX-License-Identifier: Apache-2.0
// libtorch's SGD and AdamW with steps that pass over memory once: one loop over all tensors of a
// group reads and writes parameter, gradient and state, instead of one loop for each operation and
// tensor. Options, state and saved files are those of the base class, so that either class reads
// files of the other. Results agree to the rounding of fused multiply-adds; fp16 and bf16 are
// computed in fp32 and rounded once (libtorch rounds after every operation). State has its
// parameter's type and device: state that was loaded with others, or was made before module->to(),
// is converted at the next step, as Python's load_state_dict() does (libtorch's C++ keeps the
// state's own type, and throws for another device).
//
// Supports dense tensors of fp16, bf16, fp32 and fp64 on the CPU and on GPUs, with strides that
// fill memory without gaps. On a GPU a step is enqueued on libtorch's current stream of its device;
// the first one loads the kernels, which may block. For other tensors step() throws before it
// changes anything: Unsupported for other devices and if kernels cannot be loaded; Caller
// otherwise, also for state of another shape and for a parameter that is listed twice. The error
// advises libtorch's own class if that helps. If a step fails later, for want of memory or at a
// launch, the tensors of finished launches have been stepped and the others are unchanged.
#pragma once

#include <memory>
#include <utility>

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <weft/base/export.h>

namespace weft {

namespace optim {
class CudaSteps;
}

// torch::optim::SGD with steps that pass over memory once.
class WEFT_API FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  // Steps all parameters that have a gradient. Calls the closure once, before, and returns its
  // loss.
  at::Tensor step(LossClosure closure = nullptr) override;
  // For Weft's own use: steps on other GPUs than the machine's.
  void step_by(std::shared_ptr<optim::CudaSteps> cuda) { cuda_ = std::move(cuda); }

 private:
  std::shared_ptr<optim::CudaSteps> cuda_;  // null until a parameter lies on a GPU
};

// torch::optim::AdamW with steps that pass over memory once.
class WEFT_API FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  // Steps all parameters that have a gradient. Calls the closure once, before, and returns its
  // loss.
  at::Tensor step(LossClosure closure = nullptr) override;
  // For Weft's own use: steps on other GPUs than the machine's.
  void step_by(std::shared_ptr<optim::CudaSteps> cuda) { cuda_ = std::move(cuda); }

 private:
  std::shared_ptr<optim::CudaSteps> cuda_;  // null until a parameter lies on a GPU
};

}  // namespace weft
