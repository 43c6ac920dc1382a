// The two ends of a message in the autograd graph. Where tensors that require grad are sent, a
// SendNode has the edges of the graph that made them; where they arrive, a RecvNode is their
// gradient function. What a pass brings to the RecvNode travels back and leaves the SendNode.
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
  // Gradients go on as they came; an undefined one is none.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  const MessageId message_;
  const int to_;
};

class RecvNode final : public torch::autograd::Node {
 public:
  RecvNode(MessageId message, rpc::WorkerInfo from, std::weak_ptr<Context> context)
      : message_(message), from_(std::move(from)), context_(std::move(context)) {}
  // Makes this the tensor's gradient function. Not while a pass runs.
  void attach(const at::Tensor& tensor, std::size_t slot);
  const MessageId& message() const { return message_; }
  const rpc::WorkerInfo& from() const { return from_; }
  std::string name() const override { return "weft::RecvNode"; }
  // The sender's order.
  std::vector<at::Tensor> by_slot(torch::autograd::variable_list&& gradients) const;
  // Sends them. Throws Caller outside of a pass of its context: loss.backward() instead of
  // context.backward({loss}).
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  const MessageId message_;
  const rpc::WorkerInfo from_;
  const std::weak_ptr<Context> context_;
  std::vector<std::size_t> slots_;  // of the inputs
};

}  // namespace weft::autograd
