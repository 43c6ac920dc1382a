// SPDX-License-Identifier: Apache-2.0
// One backward pass, as one worker runs it. Gradients of messages that were sent from here arrive
// one by one, each on a thread of the thread pool, which runs the nodes that they make ready.
// Gradients of messages that came here are sent as soon as their RecvNode runs. The pass has ended
// here when all expected gradients have come, all nodes have run, and all sent gradients have been
// answered.
//
// The first worker that brings a gradient here is answered when the pass has ended here, later ones
// at once. So the root, which began the pass, learns when everything has run. messages.h has the
// messages, docs/autograd.md an outline.
//
// Owned by the context while it runs; messages and users' futures share it. Its parts are what has
// to run here, the gradients sent, the gradients of parameters, and the ending; each locks for
// itself. Usable from every thread; start() and arrive() run nodes.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/graph.h>
#include <weft/engine/autograd/local_part.h>
#include <weft/engine/autograd/pass_ending.h>
#include <weft/engine/autograd/pass_gradients.h>
#include <weft/engine/autograd/sent_gradients.h>
#include <weft/engine/future/future.h>
#include <weft/engine/tensor/torch_releases.h>
#include <weft/profiling/trace/operation.h>

namespace weft::autograd {

class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<call::AgentCore> core, std::shared_ptr<Context> context, PassName name,
       std::uint64_t order, Deadline deadline);
  const std::shared_ptr<Context>& context() const { return context_; }
  const PassName& name() const { return name_; }
  // Numbers the context's passes in the order in which they began on this worker.
  std::uint64_t order() const { return order_; }

  Deadline deadline() const { return deadline_; }
  LocalPart& local() { return local_; }
  const SentGradients& sent() const { return sent_; }
  PassGradients& gradients() { return gradients_; }
  const PassEnding& ending() const { return ending_; }

  // Starts the timer of the pass's deadline.
  void watch();
  // Starts the pass at the root. Runs the nodes that are ready.
  void start(const std::vector<torch::autograd::Edge>& roots, variable_list gradients);
  // At the root: done when start() has run, or the pass has failed.
  Future<void> started() const { return started_.future(); }
  // True once, for the first gradient that comes here: its sender is answered when the pass has
  // ended here. Always false at the root.
  bool adopt() { return !adopted_.exchange(true); }
  // Takes the gradients of a message that was sent from here. Runs the nodes that are ready.
  void arrive(const NodePtr<SendNode>& send, variable_list gradients);
  // Fails the pass on all workers, unless it has ended.
  void fail(const Outcome& why);

  // The pass whose node this thread runs; null outside of nodes.
  static Pass* current();
  // Called by a node that the pass runs.
  void send(const RecvNode& node, std::vector<at::Tensor> gradients);

 private:
  void work(std::vector<Ready> ready);
  void evaluate(Ready&& task, std::vector<Ready>& ready);
  void caught(const std::string& where) noexcept;
  void end_local();
  void end_one();
  void tell(const Outcome& why);
  void expire();
  void set_started();

  const std::shared_ptr<call::AgentCore> core_;
  const std::shared_ptr<Context> context_;
  const PassName name_;
  const std::uint64_t order_;
  const Deadline deadline_;
  const bool begins_here_;  // this worker is the root
  const Promise<void> started_;
  trace::Operation traced_;  // ended by the thread that ends the pass
  std::atomic<bool> adopted_;
  std::atomic<bool> has_started_{false};
  LocalPart local_;
  SentGradients sent_;
  PassGradients gradients_;
  PassEnding ending_;
};

}  // namespace weft::autograd
