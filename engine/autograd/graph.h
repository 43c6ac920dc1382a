// SPDX-License-Identifier: Apache-2.0
// The local part of a backward pass: finds the nodes that have to run, tells when a node has all of
// its gradients, and runs it.
//
// libtorch's Engine owns its GraphTask from the first node to the last, on threads that it chooses;
// the constructor of GraphTask and its queues are not exported by the 2.11 wheel. A pass over
// several workers starts from gradients that come one by one, on the threads that receive them. So
// the order is kept here. Nodes, hooks, input buffers, the check of outputs and the rules of
// accumulation are libtorch's own.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <weft/engine/autograd/gradients.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::autograd {

using torch::autograd::Node;
using torch::autograd::variable_list;

// A node that has all of its gradients.
struct Ready {
  NodePtr<Node> node;
  torch::autograd::InputBuffer inputs;
};
// True if `a` runs after `b`: nodes that send to other workers run first, then the nodes that the
// forward pass ran last.
bool runs_later(const Ready& a, const Ready& b);

// Not thread-safe; the pass locks.
class Graph {
 public:
  // Counts all nodes that these lead to. Each edge into a node brings one gradient.
  void count_from(const std::vector<NodePtr<Node>>& nodes);
  void count_edge(const torch::autograd::Edge& edge) { ++waiting_[edge.function.get()].missing; }
  // Delivers a gradient, which may be undefined and was computed on `producer`. Returns the node if
  // this was the last gradient that it waited for.
  std::optional<Ready> deliver(const torch::autograd::Edge& edge, at::Tensor&& gradient,
                               const std::optional<c10::Stream>& producer);
  void clear() { waiting_.clear(); }

 private:
  struct Waiting {
    int missing = 0;
    std::optional<torch::autograd::InputBuffer> inputs;
    bool visited = false;
  };
  std::unordered_map<Node*, Waiting> waiting_;
};

// All nodes that these lead to, including themselves.
std::vector<Node*> reachable_from(const std::vector<Node*>& nodes);

// Runs a node with its hooks, on its stream. Passes a leaf's gradient to `accumulate`. Rethrows the
// node's exceptions; in libtorch's anomaly mode throws for NaN outputs.
variable_list run_node(
    Ready&& ready, bool retain_graph,
    const std::function<void(const at::Tensor& parameter, const at::Tensor& gradient,
                             std::size_t held)>& accumulate);

// In libtorch's anomaly mode: logs the place in the forward pass that made a node which has thrown,
// as libtorch's engine does.
void show_forward(Node& node) noexcept;

}  // namespace weft::autograd
