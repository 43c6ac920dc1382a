// SPDX-License-Identifier: Apache-2.0
// The reducer's hooks on the gradient accumulators of a model's parameters. They are the nodes of
// libtorch's graph that write .grad, so they also say which parameters a graph or a backward
// reaches. The reducer owns it, and the reducer's mutex guards it. Nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <weft/engine/tensor/torch_releases.h>

namespace weft::parallel {

// True if libtorch's engine runs inside a distributed pass. The pass does not use that engine, so
// one of its nodes has called backward() or grad().
bool is_inside_a_pass();

class AccumulatorHooks {
 public:
  explicit AccumulatorHooks(std::size_t parameters) : hooks_(parameters) {}
  // Removes the hooks.
  ~AccumulatorHooks();
  AccumulatorHooks(const AccumulatorHooks&) = delete;
  AccumulatorHooks& operator=(const AccumulatorHooks&) = delete;

  // Hooks the accumulator that the parameter has now. A graph may still end in the one before, so
  // that one keeps its hook. `on_gradient` is called when parameter.grad() has the gradient, on the
  // thread of its backward, which does not hold the reducer's mutex.
  void attach(std::size_t parameter, const at::Tensor& tensor, std::function<void()> on_gradient);
  // False if the parameter has got another accumulator: libtorch gives it one when its storage is
  // set (torch::load) or its type changes.
  bool is_attached(std::size_t parameter, const at::Tensor& tensor) const;
  // Forgets former accumulators in which no graph ends any more.
  void drop_former();

  // True if the backward that runs here can change a parameter's gradient. torch::autograd::grad()
  // cannot: it returns its results to the caller, and one rank may call it as often as it likes
  // (gradient penalties, adversarial examples).
  bool are_reached() const;
  // The parameters on which none of the outputs depends.
  std::vector<std::size_t> unreachable_from(const std::vector<at::Tensor>& outputs) const;

 private:
  struct Hook {
    NodePtr<torch::autograd::Node> accumulator;
    std::uintptr_t key = 0;
  };
  std::vector<Hook> hooks_;  // by parameter; without an accumulator until attach()
  std::vector<Hook> former_;
};

}  // namespace weft::parallel
