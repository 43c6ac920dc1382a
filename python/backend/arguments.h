// SPDX-License-Identifier: Apache-2.0
// What c10d passes, as Weft takes it.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <weft/group.h>

namespace weft::python {

// The one tensor of a list. Throws CallerError for any other number.
const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors);

// The tensor's memory as a contiguous tensor, for operations that treat all elements alike: a dense
// tensor in any order of dimensions. Throws CallerError for tensors with gaps.
at::Tensor flat(const char* operation, const at::Tensor& tensor);

// The same tensor in a type that Weft carries: types that it does not know are moved as bytes.
at::Tensor movable(const at::Tensor& tensor);

// A reduction of c10d: the operator, and the factor that PREMUL_SUM multiplies by first.
struct Reduction {
  ReduceOp op = ReduceOp::Sum;
  at::Tensor factor;  // undefined: none
};
Reduction reduction_of(const char* operation, const c10d::ReduceOp& op);

}  // namespace weft::python
