// SPDX-License-Identifier: Apache-2.0
// Converts the arguments of c10d's calls into those of Weft's.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <weft/group.h>

namespace weft::python {

// The one element of a list, a tensor or a list of tensors. Throws Caller for any other number.
const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor>& only(const char* operation, std::vector<std::vector<at::Tensor>>& lists);

// Throws Caller if two lists, of which each element belongs to one of the other, differ in length.
void check_pairs(const char* operation, std::size_t outputs, std::size_t inputs);

// A contiguous tensor of the same elements, in a type that Weft carries: types that it does not
// know are moved as bytes. Shares memory if the tensor is contiguous.
at::Tensor movable(const at::Tensor& tensor);
std::vector<at::Tensor> movable(const std::vector<at::Tensor>& tensors);

// The outputs of an operation. A contiguous tensor takes the place of each that is not contiguous,
// as the order of its elements in memory may differ between ranks. IssuedWork copies it back when
// the operation has ended, on any thread. Throws Caller if elements of an output share memory.
class Outputs {
 public:
  explicit Outputs(const char* operation) : operation_(operation) {}

  at::Tensor of(const at::Tensor& output);
  std::vector<at::Tensor> of(const std::vector<at::Tensor>& outputs);
  // For a tensor that the operation reads and changes.
  at::Tensor in_place(const at::Tensor& tensor);
  // True if nothing needs to be copied.
  bool is_direct() const { return pairs_.empty(); }
  void copy_back() const;
  // The device of the outputs that are copied, of which there is at least one.
  c10::Device device() const { return pairs_.front().first.device(); }

 private:
  void check_elements(const at::Tensor& tensor) const;

  const char* operation_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // output, the tensor in its place
};

// The equal parts of a contiguous tensor, each with the shape of `like`.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, int count, const at::Tensor& like);

// A reduction of c10d: the operator, and the factor that PREMUL_SUM multiplies by first.
struct Reduction {
  ReduceOp op = ReduceOp::Sum;
  at::Tensor factor;  // undefined: none

  // Multiplies in place.
  void scale(at::Tensor tensor) const;
  // The tensor, or a multiplied copy.
  at::Tensor scaled(const at::Tensor& tensor) const;
};
Reduction reduction_of(const char* operation, const c10d::ReduceOp& op);

}  // namespace weft::python
