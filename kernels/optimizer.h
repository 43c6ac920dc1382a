// What an optimizer step is given. The meaning of every option is torch.optim's; the names are its
// too.
//
// Parameters and state are of one type, fp16, bf16, fp32 or fp64; gradients of the same, or of fp16
// or bf16 where parameters are fp32. A parameter without a gradient is simply left out of the call:
// its decay, momentum and step count then rest.
#pragma once

#include <cstdint>

#include <weft/base/slice.h>

namespace weft::kernels {

struct SgdTensor {
  Slice parameter, gradient;
  Slice momentum_buffer;  // unused when momentum is 0
  bool first_step =
      false;  // the buffer holds nothing yet: it takes the gradient as it is, undampened
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
  Slice max_exp_avg_sq;       // the same; unused without amsgrad
  std::int64_t step = 1;      // which step of this parameter it is, counted from 1
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = true;  // false: Adam, where the decay is added to the gradient (L2)
};

}  // namespace weft::kernels
