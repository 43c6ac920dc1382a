// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_set>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/accumulator_hooks.h>

namespace weft::parallel {

bool is_inside_a_pass() {
  return autograd::Pass::current() != nullptr && torch::autograd::get_current_graph_task_id() >= 0;
}

AccumulatorHooks::~AccumulatorHooks() {
  for (const auto* hooks : {&hooks_, &former_}) {
    for (const Hook& hook : *hooks) {
      if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
    }
  }
}

void AccumulatorHooks::attach(std::size_t parameter, const at::Tensor& tensor,
                              std::function<void()> on_gradient) {
  Hook& hook = hooks_[parameter];
  if (hook.accumulator) former_.push_back(std::move(hook));
  hook.accumulator = torch::autograd::impl::grad_accumulator(tensor);
  const auto on_post = [on_gradient = std::move(on_gradient)](
                           const torch::autograd::variable_list& outputs,
                           const torch::autograd::variable_list&) {
    on_gradient();
    return outputs;
  };
  hook.key = hook.accumulator->add_post_hook(
      std::make_unique<torch::autograd::utils::LambdaPostHook>(on_post));
}

bool AccumulatorHooks::is_attached(std::size_t parameter, const at::Tensor& tensor) const {
  const auto& accumulator = hooks_[parameter].accumulator;
  return accumulator && torch::autograd::impl::try_get_grad_accumulator(tensor) == accumulator;
}

void AccumulatorHooks::drop_former() {
  std::erase_if(former_, [](const Hook& hook) { return hook.accumulator.use_count() == 1; });
}

bool AccumulatorHooks::are_reached() const {
  if (autograd::Pass::current() != nullptr) return !is_inside_a_pass();
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;  // backward() without a list of inputs
  const auto is_wanted = [&](const Hook& hook) {
    const auto found = wanted->find(hook.accumulator.get());
    return found != wanted->end() && found->second.needed_;
  };
  return std::any_of(hooks_.begin(), hooks_.end(), is_wanted) ||
         std::any_of(former_.begin(), former_.end(), is_wanted);
}

std::vector<std::size_t> AccumulatorHooks::unreachable_from(
    const std::vector<at::Tensor>& outputs) const {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  const auto context = autograd::current_context();
  bool goes_on_elsewhere = false;
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
    if (!context || goes_on_elsewhere || dynamic_cast<autograd::RecvNode*>(node) == nullptr)
      continue;
    goes_on_elsewhere = true;
    // Another worker's result may depend on everything that was sent in this context.
    for (const auto& send : context->recording().all()) visit(send.get());
  }
  std::vector<std::size_t> unreachable;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    if (!seen.contains(hooks_[i].accumulator.get())) unreachable.push_back(i);
  }
  return unreachable;
}

}  // namespace weft::parallel
