// SPDX-License-Identifier: Apache-2.0
// The marks of a tensor that is one rank's rows of a larger one (engine/shard), and of its
// gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace weft {

// Code that takes the tensors of all ranks for copies of each other refuses a shard. The mark
// travels with the tensor and its detached aliases, not with copies.
struct ShardMark : c10::BackendMeta {};

inline bool is_shard(const at::Tensor& tensor) {
  return tensor.defined() && dynamic_cast<const ShardMark*>(
                                 tensor.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

// The mark of a shard's .grad that stands in for a gradient which no_sync() keeps elsewhere.
struct StandInMark : c10::BackendMeta {};

inline bool is_stand_in(const at::Tensor& gradient) {
  return gradient.defined() && dynamic_cast<const StandInMark*>(
                                   gradient.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

}  // namespace weft
