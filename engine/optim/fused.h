// libtorch's SGD and AdamW with steps that pass over memory once: parameter, gradient and state are
// read and written in one loop over all tensors of a group, instead of one loop for each operation
// and tensor. Options, state and saved files are those of the class they derive from, so that
// either reads what the other wrote. Results agree to the rounding of fused multiply-adds; fp16 and
// bf16 are computed in fp32 and rounded once (libtorch rounds after every operation). State has its
// parameter's type and device: what was loaded with others, or was made before module->to(), is
// converted at the next step, as Python's load_state_dict() does (libtorch's C++ goes on with the
// state's own type, and throws for another device).
//
// For dense tensors of fp16, bf16, fp32 and fp64 on the CPU and on GPUs, whose strides fill memory
// without gaps. On a GPU a step is enqueued on libtorch's current stream of its device; the first
// one loads the kernels, which may block. For others step() throws before it changes anything:
// Unsupported for other devices and where kernels cannot be loaded, Caller otherwise, as for state
// of another shape or a parameter that is listed twice, with the advice to take libtorch's own
// where that helps. Where one fails later, for want of memory or at a launch, what has been
// launched has been stepped, and the rest is as it was.
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

class WEFT_API FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
  // For Weft's own use: steps on other GPUs than the machine's.
  void step_by(std::shared_ptr<optim::CudaSteps> cuda) { cuda_ = std::move(cuda); }

 private:
  std::shared_ptr<optim::CudaSteps> cuda_;  // null until a parameter lies on a GPU
};

class WEFT_API FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
  // For Weft's own use: steps on other GPUs than the machine's.
  void step_by(std::shared_ptr<optim::CudaSteps> cuda) { cuda_ = std::move(cuda); }

 private:
  std::shared_ptr<optim::CudaSteps> cuda_;  // null until a parameter lies on a GPU
};

}  // namespace weft
