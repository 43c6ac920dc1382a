// SPDX-License-Identifier: Apache-2.0
// The arguments of an optimizer step. Options have the names and meanings of torch.optim.
//
// Parameters and state have one type: fp16, bf16, fp32 or fp64. Gradients have the same type, or
// fp16 or bf16 with fp32 parameters. To skip a parameter without a gradient, leave it out of the
// call: its decay, momentum and step count then do not change.
#pragma once

#include <cstdint>

#include <weft/base/slice.h>

namespace weft::kernels {

struct SgdTensor {
  Slice parameter, gradient;
  Slice momentum_buffer;  // unused when momentum is 0
  // The buffer has no value yet: it becomes the gradient, undampened.
  bool first_step = false;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  // needs momentum, and no dampening
  bool maximize = false;
};

struct AdamWTensor {
  Slice parameter, gradient;
  Slice exp_avg, exp_avg_sq;  // zero before step 1
  Slice max_exp_avg_sq;       // zero before step 1; unused without amsgrad
  std::int64_t step = 1;      // the number of this parameter's step, from 1
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = true;  // false: Adam, which adds the decay to the gradient (L2)
};

}  // namespace weft::kernels
