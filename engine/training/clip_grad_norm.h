// SPDX-License-Identifier: Apache-2.0
// clip_grad_norm_: limits the norm of a model's gradients, for models on one device, behind
// DistributedDataParallel, and sharded over ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace weft {

// Multiplies the gradients of the model's parameters by max_norm / norm if their norm, taken as one
// vector, is larger than max_norm. Returns the norm before that, the same on all ranks. `norm_type`
// is the p of the p-norm: a positive number, or infinity for the largest absolute value. If the
// norm is inf or NaN, gradients become 0 and NaN; the caller may look at the norm.
//
// Called after backward() (outside of no_sync()) and before the optimizer's step, on all ranks. A
// model whose gradients DistributedDataParallel has averaged needs no communication. The shards of
// a sharded model add up to one norm by an all_reduce over their group. `over` names ranks that
// hold different parameters of one model, as the stages of a pipeline do; never the ranks of a
// DistributedDataParallel, which would count each gradient once for each rank. Does not wait for
// the GPU. Throws Caller for a max_norm that is negative or NaN, for other norm_types, and while
// no_sync() of a sharded model keeps gradients.
WEFT_API at::Tensor clip_grad_norm_(const torch::nn::Module& model, double max_norm,
                                    double norm_type = 2, ProcessGroup over = {});

}  // namespace weft
