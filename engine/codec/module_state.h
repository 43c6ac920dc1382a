// SPDX-License-Identifier: Apache-2.0
// The parameters and buffers of a module, as a value that travels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <weft/base/export.h>
#include <weft/engine/codec/values.h>

namespace weft {

// The parameters and buffers of a module, as values that a call can carry.
struct WEFT_API ModuleState {
  std::vector<std::pair<std::string, at::Tensor>> parameters;  // by their names in the module
  // The buffers, by their names in the module.
  std::vector<std::pair<std::string, at::Tensor>> buffers;

  // Copies the values into a module of the same structure. If a name is missing on either side or a
  // shape differs, throws Caller and leaves the module as it is.
  void load_into(torch::nn::Module& module) const;
  WEFT_FIELDS(parameters, buffers)
};

// The module's own tensors, detached, not copied: a call sends the values that they hold when it is
// issued.
WEFT_API ModuleState state_of(const torch::nn::Module& module);
// The same for a module holder (TORCH_MODULE) or a shared_ptr.
template <class Holder>
requires requires(const Holder& holder) { static_cast<const torch::nn::Module&>(*holder); }
ModuleState state_of(const Holder& holder) {
  return state_of(static_cast<const torch::nn::Module&>(*holder));
}

}  // namespace weft
