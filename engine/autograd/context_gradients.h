// SPDX-License-Identifier: Apache-2.0
// The gradients of one autograd context on this worker: the sum of the passes that cannot fail any
// more, and the gradients of each pass that has succeeded here but may still fail elsewhere. Not
// thread-safe: Passes locks.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/ids.h>

namespace weft::autograd {

class ContextGradients {
 public:
  // `self`: the rank of this worker.
  explicit ContextGradients(int self) : self_(self) {}
  // Notes that the root's passes before `settled` have ended on all workers.
  void settle(int root, PassId settled);
  // True if the root has settled the pass.
  bool is_settled(PassId pass) const;
  // Takes the gradients of a pass that has succeeded here. `order`: the pass's place in the order
  // in which the passes began here.
  void add(std::uint64_t order, PassId pass, Gradients&& gradients);
  // Takes the gradients of a pass back, because it has failed elsewhere.
  Gradients discard(PassId pass);
  // Adds to the sum the gradients of passes that cannot fail elsewhere any more.
  void fold();
  // True if a pass of another root may still fail elsewhere.
  bool may_lose_any() const;
  // Sums over all passes.
  at::Tensor gradient(const at::Tensor& parameter);
  std::vector<std::pair<at::Tensor, at::Tensor>> all();

 private:
  struct Fresh {
    PassId pass = 0;
    Gradients gradients;
  };
  int self_;
  std::map<int, PassId> settled_;  // by root: its passes before this one have ended
  // In the order in which the passes began here.
  std::map<std::uint64_t, Fresh> fresh_;
  Gradients sum_;
};

}  // namespace weft::autograd
