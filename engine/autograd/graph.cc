// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <weft/engine/autograd/graph.h>
#include <weft/engine/autograd/nested.h>
#include <weft/engine/autograd/nodes.h>

namespace weft::autograd {

namespace {

variable_list after_tensor_hooks(Node& node, variable_list gradients) {
  for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
  for (const auto& [input, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

// In anomaly mode, throws for NaN as libtorch's engine does, with its text.
void require_no_nan(const Node& node, const variable_list& outputs) {
  if (!torch::autograd::AnomalyMode::is_enabled() ||
      !torch::autograd::AnomalyMode::should_check_nan())
    return;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    if (!output.defined()) continue;
    const at::Tensor values = output.is_sparse() ? output._values() : output;
    if (!values.isnan().any().item<bool>()) continue;
    throw std::runtime_error("Function '" + node.name() + "' returned nan values in its " +
                             std::to_string(i) + "th output.");
  }
}

// Makes the node's stream wait for inputs that were computed on other streams.
void wait_for_inputs(const torch::autograd::InputBuffer& inputs,
                     const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  for (std::size_t i = 0; i < inputs.ready_events.size(); ++i) {
    const auto& event = inputs.ready_events[i];
    if (event && inputs.ready_streams[i] != stream) event->block(*stream);
  }
}

}  // namespace

bool runs_later(const Ready& a, const Ready& b) {
  const bool a_sends = dynamic_cast<const RecvNode*>(a.node.get()) != nullptr;
  const bool b_sends = dynamic_cast<const RecvNode*>(b.node.get()) != nullptr;
  if (a_sends != b_sends) return b_sends;
  return a.node->sequence_nr() < b.node->sequence_nr();
}

void Graph::count_from(const std::vector<NodePtr<Node>>& nodes) {
  std::vector<Node*> open;
  const auto visit = [&](Node* node) {
    Waiting& waiting = waiting_[node];
    if (!std::exchange(waiting.visited, true)) open.push_back(node);
  };
  for (const auto& node : nodes) visit(node.get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      visit(edge.function.get());
      count_edge(edge);
    }
  }
}

std::optional<Ready> Graph::deliver(const torch::autograd::Edge& edge, at::Tensor&& gradient,
                                    const std::optional<c10::Stream>& producer) {
  Waiting& waiting = waiting_.at(edge.function.get());
  if (!waiting.inputs)
    waiting.inputs.emplace(static_cast<std::size_t>(edge.function->num_inputs()));
  waiting.inputs->add(edge.input_nr, std::move(gradient), producer, edge.function->stream(),
                      edge.function.get());
  if (--waiting.missing > 0) return std::nullopt;
  return Ready{edge.function, *std::exchange(waiting.inputs, std::nullopt)};
}

std::vector<Node*> reachable_from(const std::vector<Node*>& nodes) {
  std::vector<Node*> reached;
  std::unordered_set<Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) reached.push_back(node);
  };
  for (Node* node : nodes) visit(node);
  for (std::size_t i = 0; i < reached.size(); ++i) {
    for (const auto& edge : reached[i]->next_edges()) visit(edge.function.get());
  }
  return reached;
}

variable_list run_node(
    Ready&& ready, bool retain_graph,
    const std::function<void(const at::Tensor&, const at::Tensor&, std::size_t)>& accumulate) {
  Node& node = *ready.node;
  const auto stream = node.stream();
  const c10::OptionalStreamGuard guard(stream);
  wait_for_inputs(ready.inputs, stream);
  std::optional<NestedPasses> nested;
  if (runs_user_code(node)) nested.emplace();
  variable_list gradients = after_tensor_hooks(node, std::move(ready.inputs.buffer));
  for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
  const bool has_post_hooks = !node.post_hooks().empty();
  const variable_list seen = has_post_hooks ? gradients : variable_list();
  variable_list outputs;
  if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
    if (!gradients.empty() && gradients[0].defined())
      accumulate(leaf->variable, gradients[0], has_post_hooks ? 2 : 1);
    gradients.clear();
  } else {
    if (!retain_graph) node.will_release_variables();
    outputs = node(std::move(gradients));
    torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& text) {
      return node.name() + ": " + text;
    });
    if (!retain_graph) node.release_variables();
  }
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, seen);
  require_no_nan(node, outputs);
  if (nested) {
    nested->take([&](const at::Tensor& parameter, const at::Tensor& gradient) {
      accumulate(parameter, gradient, 1);
    });
  }
  return outputs;
}

void show_forward(Node& node) noexcept {
  if (!torch::autograd::AnomalyMode::is_enabled()) return;
  try {
    node.metadata()->print_stack(node.name());
  } catch (...) {
    // A warning handler of the user has thrown; the node's own error is reported.
  }
}

}  // namespace weft::autograd
