// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <torch/csrc/autograd/variable.h>

#include <weft/base/error.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/autograd/pass.h>

namespace weft::autograd {

SendNode::SendNode(MessageId message, int to, const std::vector<at::Tensor>& tensors)
    : message_(message), to_(to) {
  for (const at::Tensor& tensor : tensors) {
    add_input_metadata(tensor);
    add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  }
}

torch::autograd::variable_list SendNode::apply(torch::autograd::variable_list&& gradients) {
  return std::move(gradients);
}

void RecvNode::attach(const at::Tensor& tensor, std::size_t slot) {
  slots_.push_back(slot);
  torch::autograd::impl::set_gradient_edge(tensor, {getptr(), add_input_metadata(tensor)});
}

std::vector<at::Tensor> RecvNode::by_slot(torch::autograd::variable_list&& gradients) const {
  std::vector<at::Tensor> sorted;
  for (std::size_t i = 0; i < slots_.size() && i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    sorted.resize(std::max(sorted.size(), slots_[i] + 1));
    at::Tensor& sum = sorted[slots_[i]];
    // The message's reader has taken one value twice.
    sum = sum.defined() ? sum_of(sum, gradients[i]) : std::move(gradients[i]);
  }
  for (at::Tensor& gradient : sorted) {
    if (gradient.defined() && gradient.requires_grad()) gradient = gradient.detach();
  }
  return sorted;
}

torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&& gradients) {
  Pass* pass = Pass::current();
  if (pass == nullptr || pass->context() != context_.lock()) {
    throw Error(Blame::Caller, "a gradient for a tensor that came from " + describe(from_) +
                                   " inside an AutogradContext: use context.backward({loss}) of "
                                   "that context, not loss.backward()");
  }
  pass->send(*this, by_slot(std::move(gradients)));
  return {};
}

}  // namespace weft::autograd
