// SPDX-License-Identifier: Apache-2.0
// One backward pass, as one worker runs it. Gradients of messages that were sent from here arrive
// one by one, each on a thread of the thread pool, which runs the nodes that they make ready.
// Gradients of messages that came here are sent as soon as their RecvNode runs. The pass has ended
// here when all expected gradients have come, all nodes have run, and all sent gradients have been
// answered.
//
// The first worker that brings a gradient here is answered when the pass has ended here, later ones
// at once. So the root, which began the pass, learns when everything has run. docs/autograd.md
// describes the protocol.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/graph.h>
#include <weft/engine/future/future.h>
#include <weft/engine/tensor/torch_releases.h>
#include <weft/profiling/trace/operation.h>

namespace weft::autograd {

class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<rpc::AgentCore> core, std::shared_ptr<Context> context, PassName name,
       std::uint64_t order, Deadline deadline);
  const std::shared_ptr<Context>& context() const { return context_; }
  const PassName& name() const { return name_; }
  // Numbers the context's passes in the order in which they began on this worker.
  std::uint64_t order() const { return order_; }

  // Starts the timer of the pass's deadline.
  void watch();
  // Counts the nodes that take part; called before the pass starts. `roots`: the roots' edges, on
  // the root worker.
  void expect(std::vector<NodePtr<SendNode>> sends,
              const std::vector<torch::autograd::Edge>& roots = {});
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
  Future<Outcome> ended() const { return promise_.future(); }
  // True once the pass has failed here; may outlive it.
  std::shared_ptr<const std::atomic<bool>> failure() const { return failed_; }
  Deadline deadline() const { return deadline_; }
  // True if a gradient has been sent from here to that worker, so that it takes part.
  bool reached(int rank) const;
  // For a failed pass: done when the others have been told, or have not answered within kTold. A
  // worker that has not answered hears of it later (PassName::failed).
  Future<void> told() const;

  // --- for the nodes that it runs
  // The pass whose node this thread runs; null outside of nodes.
  static Pass* current();
  void send(const RecvNode& node, std::vector<at::Tensor> gradients);
  // Runs `callback` on this worker after all local nodes; an exception of it fails the pass.
  void at_end(std::function<void()> callback);
  // The parameter's gradient in this pass so far, undefined if there is none. It may be replaced;
  // the reference is valid while the pass runs.
  at::Tensor& gradient(const at::Tensor& parameter);
  // Adds the context's gradient of earlier passes to that one, which replaces the sum when this
  // pass succeeds.
  void absorb(const at::Tensor& parameter);

 private:
  void work(std::vector<Ready> ready);
  void evaluate(Ready&& task, std::vector<Ready>& ready);
  void caught(const std::string& where) noexcept;
  void end_local();
  void end_one();
  void answered(int rank);
  void expire();
  void set_started();

  const std::shared_ptr<rpc::AgentCore> core_;
  const std::shared_ptr<Context> context_;
  const PassName name_;
  const std::uint64_t order_;
  const Deadline deadline_;
  const bool begins_here_;  // this worker is the root
  const Promise<Outcome> promise_;
  const Promise<void> started_;
  trace::Operation traced_;  // ended by the thread that ends the pass
  EventLoop::Registration timer_ WEFT_GUARDED_BY(mutex_);
  std::atomic<bool> ended_{false};
  const std::shared_ptr<std::atomic<bool>> failed_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> adopted_;
  std::atomic<bool> has_started_{false};
  std::atomic<std::int64_t> local_{1};  // expected gradients, ready or running nodes, and the start
  std::atomic<std::int64_t> open_{1};   // gradients sent and unanswered, and the local part

  mutable Mutex mutex_;
  bool has_counted_ WEFT_GUARDED_BY(mutex_) = false;  // expect() has been called
  Graph graph_ WEFT_GUARDED_BY(mutex_);
  std::vector<NodePtr<SendNode>> sends_ WEFT_GUARDED_BY(mutex_);  // keeps their graphs alive
  // With the rank that the message was sent to.
  std::map<MessageId, int> expected_ WEFT_GUARDED_BY(mutex_);
  std::set<int> reached_ WEFT_GUARDED_BY(mutex_);
  // Ranks with an unanswered gradient, once for each.
  std::multiset<int> unanswered_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> at_end_ WEFT_GUARDED_BY(mutex_);
  Gradients gradients_ WEFT_GUARDED_BY(mutex_);
  Future<void> told_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
