// Backward passes that a node runs within itself: activation recomputation, whose backward()
// computes a part of the forward pass once more and calls backward() for it. libtorch's engine runs
// those, and writes leaves' gradients to `.grad`; in a context they belong to the pass.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace weft::autograd {

// Whether user code runs in it: a custom autograd::Function, a node of the program's own, or one
// with hooks.
bool runs_user_code(torch::autograd::Node& node);

// While it lives, on its thread, it notes what nested passes add to leaves' `.grad`, also on the
// engine's threads.
class NestedPasses {
 public:
  NestedPasses();
  // Leaves that live have the `.grad` that they had before.
  ~NestedPasses();
  NestedPasses(const NestedPasses&) = delete;
  NestedPasses& operator=(const NestedPasses&) = delete;

  // Calls `accumulate` for each leaf that outlives the node, such as parameters; the others are the
  // node's own, and it has read their `.grad`.
  void take(
      const std::function<void(const at::Tensor& leaf, const at::Tensor& gradient)>& accumulate);

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::uint64_t callback_ = 0;
};

}  // namespace weft::autograd
