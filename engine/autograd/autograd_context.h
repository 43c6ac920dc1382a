// Distributed autograd. Inside an AutogradContext the graph of a computation goes on through remote
// calls; backward() runs all of it, on all workers, and the gradients stay where their parameters
// are, in the context. docs/autograd.md.
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
class AgentCore;
}  // namespace rpc
namespace autograd {
class Context;
}

enum class BackwardMode {
  Fast,   // every recorded message leads to the roots; where one does not, the pass ends with
          // Timeout
  Exact,  // one round first finds out which do; a later pass from the same roots knows
};

struct BackwardOptions {
  bool retain_graph = false;  // for another pass over the same graph
  BackwardMode mode = BackwardMode::Fast;
  std::vector<at::Tensor> grad_outputs =
      {};  // one for each root, of its shape; without: ones, for roots of one element
};

class WEFT_API AutogradContext {
 public:
  // Begins a context: this thread's, and of all calls made by it or for it, until it is destroyed,
  // which must happen on this thread. Throws Caller where the thread has one.
  explicit AutogradContext(const rpc::Agent& agent);
  // Releases it on all workers that it reached; does not wait for them.
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  // That of the thread, or of the call that it runs; destroying what this gives ends nothing.
  // Throws Caller where there is none.
  static AutogradContext current();

  // The rank that began it in the top 16 bits, a counter below.
  std::uint64_t id() const;

  // Computes the gradients of the roots' sum with respect to all leaves that require grad, on all
  // workers. Blocks; bounded by the agent's time limit. Roots require grad and are no leaves; see
  // BackwardOptions::grad_outputs for their shapes. Throws Caller for other roots and after
  // release(); Cancelled when it is released meanwhile; Timeout; PeerLost; Remote for what a node
  // threw: the text names the worker and the node. The pass has failed on all workers then, and
  // left nothing behind.
  void backward(const std::vector<at::Tensor>& roots, const BackwardOptions& options = {});
  // The same without blocking on other workers: the local part runs on this thread, before this
  // returns.
  Future<void> backward_async(const std::vector<at::Tensor>& roots,
                              const BackwardOptions& options = {});

  // The sum of what passes have brought for the parameter, on this worker; undefined for nothing.
  // Never in parameter.grad(). Throws Caller after release().
  at::Tensor gradient(const at::Tensor& parameter) const;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;  // parameter, gradient

  // Ends it now. From any thread.
  void release();

  // For Weft's own use.
  const std::shared_ptr<rpc::AgentCore>& core() const { return core_; }
  const std::shared_ptr<autograd::Context>& shared() const { return context_; }

 private:
  AutogradContext(std::shared_ptr<rpc::AgentCore> core, std::shared_ptr<autograd::Context> context);
  const std::shared_ptr<rpc::AgentCore> core_;
  const std::shared_ptr<autograd::Context> context_;
  std::optional<weft::detail::ExecutionContextScope> scope_;  // of who began it
};

}  // namespace weft
