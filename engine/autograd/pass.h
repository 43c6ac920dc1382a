// One backward pass, as one worker runs it. Gradients of messages that were sent here come one by
// one, each on a thread of the thread pool, which runs what they make ready; gradients for messages
// that came here leave the moment their RecvNode runs. A pass has ended here when all that is
// expected has come, everything has run, and all that was sent has been answered.
//
// The first worker to bring a gradient here is answered when the pass has ended here; later ones at
// once. So whoever began it, in the end the root, knows that all has run. docs/autograd.md has the
// protocol.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <weft/base/event_loop.h>
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
  // Of its beginning on this worker, among the context's passes.
  std::uint64_t order() const { return order_; }

  // Its time limit counts, at once.
  void watch();
  // Counts what takes part; before it starts. The edges are those of the roots, where this worker
  // is the root.
  void expect(std::vector<NodePtr<SendNode>> sends,
              const std::vector<torch::autograd::Edge>& roots = {});
  // The pass begins here, at the root. Runs what it can.
  void start(const std::vector<torch::autograd::Edge>& roots, variable_list gradients);
  // At the root: done when that has run, or the pass has failed.
  Future<void> started() const { return started_.future(); }
  // True once, for the first gradient that comes here: its sender is answered when the pass has
  // ended here. Never at the root.
  bool adopt() { return !adopted_.exchange(true); }
  // The gradients of a message that was sent from here. Runs what it can.
  void arrive(const NodePtr<SendNode>& send, variable_list gradients);
  // Ends it on all workers, unless it has ended.
  void fail(const Outcome& why);
  Future<Outcome> ended() const { return promise_.future(); }
  // Whether it has failed here; may outlive it.
  std::shared_ptr<const std::atomic<bool>> failure() const { return failed_; }
  Deadline deadline() const { return deadline_; }
  // Whether a gradient has gone from here to that worker, which therefore takes part.
  bool reached(int rank) const;
  // Once it has failed: done when the others have been told, or have not answered within kTold. Who
  // has not hears of it later (PassName::failed).
  Future<void> told() const;

  // --- for the nodes that it runs
  // That of this thread; null outside of nodes.
  static Pass* current();
  void send(const RecvNode& node, std::vector<at::Tensor> gradients);
  // Run on this worker when all local nodes have; what it throws fails the pass.
  void at_end(std::function<void()> callback);
  // What the pass has brought for the parameter; undefined if nothing yet. May be replaced; valid
  // while the pass runs.
  at::Tensor& gradient(const at::Tensor& parameter);
  // Adds to that what the context has of earlier passes, whose sum it will replace when this one
  // has succeeded.
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
  trace::Operation traced_;  // whoever ends the pass ends it
  EventLoop::Registration timer_;
  std::atomic<bool> ended_{false};
  const std::shared_ptr<std::atomic<bool>> failed_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> adopted_;
  std::atomic<bool> has_started_{false};
  std::atomic<std::int64_t> local_{1};  // gradients expected, nodes ready or running, and the start
  std::atomic<std::int64_t> open_{1};   // gradients sent and unanswered, and the local part

  mutable std::mutex mutex_;  // of the rest
  bool has_counted_ = false;  // expect() has been called
  Graph graph_;
  std::vector<NodePtr<SendNode>> sends_;  // keeps their graphs alive
  std::map<MessageId, int> expected_;     // and to whom the message went
  std::set<int> reached_;
  std::multiset<int> unanswered_;  // to whom gradients have gone that have not been answered
  std::vector<std::function<void()>> at_end_;
  Gradients gradients_;
  Future<void> told_;
};

}  // namespace weft::autograd
