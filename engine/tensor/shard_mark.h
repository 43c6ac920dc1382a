// SPDX-License-Identifier: Apache-2.0
// The mark of a tensor that is one rank's rows of a larger one (engine/shard). Code that takes the
// tensors of all ranks for copies of each other refuses it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace weft {

// Travels with the tensor and its detached aliases, not with copies.
struct ShardMark : c10::BackendMeta {};

inline bool is_shard(const at::Tensor& tensor) {
  return tensor.defined() && dynamic_cast<const ShardMark*>(
                                 tensor.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

}  // namespace weft
