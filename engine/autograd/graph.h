// The local part of a backward pass: which nodes have to run, when each has all of its gradients,
// and how one runs.
//
// libtorch's Engine owns its GraphTask from the first node to the last, on threads of its own
// choice; the constructor of GraphTask and its queues are not exported by the 2.11 wheel. A pass
// over several workers starts from gradients that come one by one, on whatever thread brings them.
// So the order is kept here; nodes, hooks, input buffers, the check of outputs and the rules of
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
// Whether `a` runs after `b`: what others wait for comes first, then what the forward pass ran
// last.
bool runs_later(const Ready& a, const Ready& b);

// Not locked: the pass does that.
class Graph {
 public:
  // Everything that the nodes lead to takes part. Each edge in, also from outside, brings one
  // gradient.
  void count_from(const std::vector<NodePtr<Node>>& nodes);
  void count_edge(const torch::autograd::Edge& edge) { ++waiting_[edge.function.get()].missing; }
  // A gradient has come, made on that stream; maybe undefined. The node, if it was the last that it
  // waited for.
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

// The nodes that these lead to, themselves included.
std::vector<Node*> reachable_from(const std::vector<Node*>& nodes);

// Runs a node with its hooks; its current stream is the node's. A leaf's gradient goes to
// `gradients`, by `accumulate`. Throws what it throws, and in libtorch's anomaly mode for outputs
// that are not numbers.
variable_list run_node(
    Ready&& ready, bool retain_graph,
    const std::function<void(const at::Tensor& parameter, const at::Tensor& gradient,
                             std::size_t held)>& accumulate);

// In libtorch's anomaly mode: warns, as its engine does, where in the forward pass a node comes
// from that has thrown.
void show_forward(Node& node) noexcept;

}  // namespace weft::autograd
