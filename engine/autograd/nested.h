// SPDX-License-Identifier: Apache-2.0
// Backward passes that a node runs within itself, such as activation recomputation, whose
// backward() computes a part of the forward pass again and calls backward() for it. libtorch's
// engine runs these and writes leaves' gradients to `.grad`; in a context they belong to the pass.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace weft::autograd {

// True if the node runs user code: a custom autograd::Function, a node class of the program, or a
// node with hooks.
bool runs_user_code(torch::autograd::Node& node);

// While it lives, collects the gradients that nested passes of this thread add to leaves' `.grad`,
// on the engine's threads too.
class NestedPasses {
 public:
  NestedPasses();
  // Restores the `.grad` of leaves that still live.
  ~NestedPasses();
  NestedPasses(const NestedPasses&) = delete;
  NestedPasses& operator=(const NestedPasses&) = delete;

  // Calls `accumulate` for each leaf that outlives the node, such as parameters. The others belong
  // to the node, which has read their `.grad`.
  void take(
      const std::function<void(const at::Tensor& leaf, const at::Tensor& gradient)>& accumulate);

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::uint64_t callback_ = 0;
};

}  // namespace weft::autograd
