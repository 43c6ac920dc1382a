// SPDX-License-Identifier: Apache-2.0
// Tensors that travel together as one: cut into pieces, packed back to back, and unpacked again.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace weft::parallel {

// Groups the tensors into pieces of one dtype and device, in their order. A piece closes when it
// has reached `bytes`. Ranks that give tensors of the same shapes and dtypes get the same pieces.
std::vector<std::vector<at::Tensor>> pieces_of(const std::vector<at::Tensor>& tensors,
                                               std::size_t bytes);

// Throws Caller for a tensor that cannot be packed or written: undefined, not dense, or with
// elements that share memory. The error calls the tensor `what`.
void require_flat(const at::Tensor& tensor, const std::string& what);

// Copies the values back to back: [elements]. All tensors have one dtype and device.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);
void flatten_into(at::Tensor flat, const std::vector<at::Tensor>& tensors);
// Returns an uninitialised tensor for flatten_into().
at::Tensor empty_flat(const std::vector<at::Tensor>& tensors);
// The reverse of flatten: copies the values into the tensors, unseen by autograd.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// The part of `flat` that begins at `offset`, shaped as `tensor`, with its strides if these fill
// memory without gaps. Autograd does not know it as a view: libtorch's Optimizer::zero_grad
// detaches gradients in place, and a view refuses that.
at::Tensor view_like(const at::Tensor& flat, std::int64_t offset, const at::Tensor& tensor);

}  // namespace weft::parallel
