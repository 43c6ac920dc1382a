// SPDX-License-Identifier: Apache-2.0
// Warns once in a process that gradients end at a tensor that came from a call outside of any
// AutogradContext.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace weft::autograd {

// `result`: a leaf that requires grad, which `worker` computed by `function` from tensors that
// require grad. A backward pass that brings it a gradient ends there, and the first such pass in
// this process logs a warning. Changes nothing else.
void warn_where_gradients_end(const at::Tensor& result, const std::string& worker,
                              const std::string& function);

// True if a tensor that requires grad was computed from others that do: here, or by the worker that
// returned it from such a call.
bool is_computed(const at::Tensor& tensor);

}  // namespace weft::autograd
