// Tensors that travel together as one: cut into pieces, packed back to back, and taken apart again.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace weft::parallel {

// Tensors of one dtype and device, in their order; a piece closes when it has reached so many
// bytes. Every rank that gives tensors of the same shapes and dtypes gets the same pieces.
std::vector<std::vector<at::Tensor>> pieces_of(const std::vector<at::Tensor>& tensors,
                                               std::size_t bytes);

// Throws Caller for a tensor that has no such values, or cannot be written: undefined, sparse, or
// elements share memory. `what` is what the error calls it.
void require_flat(const at::Tensor& tensor, const std::string& what);

// The values back to back, copied: [elements]. All of one dtype and device.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);
void flatten_into(at::Tensor flat, const std::vector<at::Tensor>& tensors);
// Room for them.
at::Tensor empty_flat(const std::vector<at::Tensor>& tensors);
// The reverse of flatten: copies the values into the tensors. Autograd does not see it.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// A part of `flat` from `offset`, shaped as the tensor, with the tensor's own strides where these
// fill memory without gaps. Autograd does not know it as a view: libtorch's Optimizer::zero_grad
// detaches gradients in place, which views refuse.
at::Tensor view_like(const at::Tensor& flat, std::int64_t offset, const at::Tensor& tensor);

}  // namespace weft::parallel
