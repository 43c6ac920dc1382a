// SPDX-License-Identifier: Apache-2.0
// Distributed autograd. Inside an AutogradContext the graph of a computation continues through
// remote calls. backward() runs all of it, on all workers; each gradient stays on its parameter's
// worker, in the context. See docs/autograd.md.
//
//   AutogradContext context(agent);
//   at::Tensor loss = agent.sync<&add>("worker1", x, y).sum();
//   context.backward({loss});
//   at::Tensor g = context.gradient(x);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/future/executor.h>
#include <weft/engine/future/future.h>

namespace weft {

namespace rpc {
class Agent;
}
namespace call {
class AgentCore;
}
namespace autograd {
class Context;
}

// How a backward pass finds out which messages of the forward pass belong to it.
enum class BackwardMode {
  // Every recorded message must lead to the roots; if one does not, the pass ends with Timeout.
  Fast,
  // First finds out, in one round of messages, which of them do; later passes from the same roots
  // use the result.
  Exact,
};

// Options of AutogradContext::backward().
struct BackwardOptions {
  bool retain_graph = false;  // for another pass over the same graph
  // How the pass finds the messages that lead to its roots.
  BackwardMode mode = BackwardMode::Fast;
  // One for each root, of its shape. If empty: ones, for roots of one element.
  std::vector<at::Tensor> grad_outputs = {};
};

// A forward pass over several workers and its gradients. Calls made inside of it carry its id.
class WEFT_API AutogradContext {
 public:
  // Begins a context for this thread and for all calls made by it or on its behalf, until the
  // object is destroyed, which must happen on this thread. Throws Caller if the thread already has
  // a context.
  explicit AutogradContext(const rpc::Agent& agent);
  // Releases the context on all workers that it reached; does not wait for them.
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  // The context of this thread, or of the call that it runs. Destroying the returned object does
  // not end the context. Throws Caller if there is none.
  static AutogradContext current();

  // The rank that began it in the top 16 bits, a counter below.
  std::uint64_t id() const;

  // Computes the gradients of the roots' sum with respect to all leaves that require grad, on all
  // workers. Blocks, at most for the agent's time limit. Roots must require grad and must not be
  // leaves; for their shapes see BackwardOptions::grad_outputs. Throws Caller for other roots and
  // after release(); Cancelled if the context is released meanwhile; Timeout; PeerLost; Remote if a
  // node threw, with the worker, the node and its error in the text. If it throws, the pass has
  // failed on all workers and left nothing behind.
  void backward(const std::vector<at::Tensor>& roots, const BackwardOptions& options = {});
  // Like backward(), without blocking on other workers: runs the local part on this thread before
  // it returns.
  Future<void> backward_async(const std::vector<at::Tensor>& roots,
                              const BackwardOptions& options = {});

  // The sum of the parameter's gradients from all passes, on this worker; undefined if there are
  // none. Passes never write parameter.grad(). Throws Caller after release().
  at::Tensor gradient(const at::Tensor& parameter) const;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;  // parameter, gradient

  // Ends the context now. May be called from any thread.
  void release();

  // For Weft's own use.
  const std::shared_ptr<call::AgentCore>& core() const { return core_; }
  const std::shared_ptr<autograd::Context>& shared() const { return context_; }

 private:
  AutogradContext(std::shared_ptr<call::AgentCore> core,
                  std::shared_ptr<autograd::Context> context);
  const std::shared_ptr<call::AgentCore> core_;
  const std::shared_ptr<autograd::Context> context_;
  std::optional<weft::detail::ExecutionContextScope> scope_;  // of the thread that began it
};

}  // namespace weft
