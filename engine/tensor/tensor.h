// SPDX-License-Identifier: Apache-2.0
// Converts between at::Tensor and the types of the layers below: dtypes, slices and pins.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/fence.h>
#include <weft/base/slice.h>
#include <weft/transport/communicator.h>

namespace weft::tensor {

// Throws Caller, naming the dtype, for one that Weft does not carry.
Dtype dtype_of(at::ScalarType type);

// Throws Caller for a device that is neither CPU nor CUDA.
Device device_of(const c10::Device& device);

// The bytes of a dense, contiguous tensor. The caller keeps the tensor alive (pin).
transport::Elements elements_of(const at::Tensor& tensor);
Slice slice_of(const at::Tensor& tensor);

// Keep the tensors' memory alive.
Pin pin(at::Tensor tensor);
Pin pin(std::vector<at::Tensor> tensors);

// "float32 [3, 4] on cuda:0", for messages.
std::string describe(const at::Tensor& tensor);

// The exception's text, without the stack trace that c10's errors carry.
std::string text_of(const std::exception& error);

}  // namespace weft::tensor
