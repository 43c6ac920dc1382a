// SPDX-License-Identifier: Apache-2.0
// The two ends of a message in the autograd graph. At the sender of tensors that require grad, a
// SendNode has the edges to the graph that made them; at the receiver, a RecvNode is their gradient
// function. Gradients that reach the RecvNode are sent back and leave the SendNode.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include <weft/engine/autograd/ids.h>
#include <weft/engine/call/types.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::autograd {

class Context;

class SendNode final : public torch::autograd::Node {
 public:
  // `tensors` require grad; their order is that of the gradients.
  SendNode(MessageId message, int to, const std::vector<at::Tensor>& tensors);
  const MessageId& message() const { return message_; }
  int to() const { return to_; }  // rank
  std::string name() const override { return "weft::SendNode"; }
  // Returns the gradients unchanged; an undefined one means that there is none.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  const MessageId message_;
  const int to_;
};

class RecvNode final : public torch::autograd::Node {
 public:
  RecvNode(MessageId message, rpc::WorkerInfo from, std::weak_ptr<Context> context)
      : message_(message), from_(std::move(from)), context_(std::move(context)) {}
  // Makes this node the tensor's gradient function. Must not be called while a pass runs.
  void attach(const at::Tensor& tensor, std::size_t slot);
  const MessageId& message() const { return message_; }
  const rpc::WorkerInfo& from() const { return from_; }
  std::string name() const override { return "weft::RecvNode"; }
  // Sorts gradients into the sender's order.
  std::vector<at::Tensor> by_slot(torch::autograd::variable_list&& gradients) const;
  // Sends the gradients back. Throws Caller outside of a pass of its context: loss.backward() was
  // called instead of context.backward({loss}).
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  const MessageId message_;
  const rpc::WorkerInfo from_;
  const std::weak_ptr<Context> context_;
  std::vector<std::size_t> slots_;  // by input: the tensor's place in the message
};

}  // namespace weft::autograd
