// Tells once in a process that gradients end at a tensor which a call outside of any
// AutogradContext has brought.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace weft::autograd {

// `result`: a leaf that requires grad, which `worker` has computed by `function` from tensors that
// require grad. A backward pass that brings it a gradient ends there, and the first one in this
// process logs a warning. Nothing else changes.
void warn_where_gradients_end(const at::Tensor& result, const std::string& worker,
                              const std::string& function);

// Whether a tensor that requires grad has been computed from others that do, here or by the worker
// that it came from in such a call.
bool is_computed(const at::Tensor& tensor);

}  // namespace weft::autograd
