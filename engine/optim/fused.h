// libtorch's SGD and AdamW with steps that pass over memory once: parameter, gradient and state are read and written in one
// loop over all tensors of a group, instead of one loop for each operation and tensor. Options, state and saved files are
// those of the class they derive from, so that either reads what the other wrote. Results agree to the rounding of fused
// multiply-adds; fp16 and bf16 are computed in fp32 and rounded once (libtorch rounds after every operation).
//
// For dense tensors of fp16, bf16, fp32 and fp64 on the CPU, whose strides fill memory without gaps. For others step()
// throws before it changes anything: Unsupported on a GPU, Caller otherwise, with the advice to take libtorch's own.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace weft {

class FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace weft
