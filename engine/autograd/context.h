// SPDX-License-Identifier: Apache-2.0
// One worker's record of one autograd context: the messages recorded in it, the workers that it was
// passed to, its passes and their gradients. Thread-safe.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/edge.h>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/codec/tensors.h>
#include <weft/engine/future/future.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::rpc {
class AgentCore;
}

namespace weft::autograd {

class Pass;

// "(2, 17)".
std::string to_text(ContextId id);

// The outcome to send on for an error: its blame, and the error's text without the names of workers
// around it.
Outcome outcome_of(const std::exception_ptr& error);

class Context final : public rpc::CallContext, public std::enable_shared_from_this<Context> {
 public:
  // `steps`: the number of optimizer steps on this worker so far.
  Context(rpc::AgentCore& core, ContextId id, std::uint64_t steps = 0)
      : core_(core), id_(id), steps_before_(steps) {}
  ContextId id() const override { return id_; }
  std::shared_ptr<rpc::AgentCore> core() const;
  // The rank of the worker that made it.
  int owner() const { return static_cast<int>(id_ >> 48); }
  bool belongs_to(const rpc::AgentCore& core) const { return &core_ == &core; }

  // --- recording
  // Notes that a worker takes part: it was called from here, or has called here.
  void add_worker(int rank);
  // Called when the worker has ended the context by itself, so it need not be told.
  void remove_worker(int rank);
  std::set<int> workers() const;
  // Called when a worker cannot be reached, until it is heard of again. True if it took part and
  // was not lost before.
  bool worker_lost(int rank);
  bool has_lost(int rank) const;
  // True if the worker takes part, as far as is known here, or has made the context, and is not
  // lost.
  bool concerns(int rank) const;
  // Records a message with these tensors to that worker; does nothing if there are none.
  void sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) override;
  // Drops a message that was not sent or whose call failed: no gradient will come for it.
  void forget(const MessageId& message) override;
  // Attaches the tensors of an incoming message to a new RecvNode.
  codec::AttachGradient receiver(const MessageId& message, const rpc::WorkerInfo& from) override;
  // Null if the message is not recorded.
  NodePtr<SendNode> send_of(const MessageId& message) const;
  std::vector<NodePtr<SendNode>> sends() const;

  // --- passes
  struct Joined {
    std::shared_ptr<Pass> pass;  // null if the pass has ended here
    Outcome outcome;             // if the pass has ended
  };
  // Returns the pass of that name, in which this worker takes part; begins it if it is new here.
  Joined join(const std::shared_ptr<rpc::AgentCore>& core, const PassName& name, Deadline deadline);
  // Begins a pass of this worker, before any of its messages can come. Sets the pass's number, the
  // number of the oldest unsettled pass, and, if it makes a plan, the plan's number in its name.
  // Throws Caller after release().
  std::shared_ptr<Pass> begin(const std::shared_ptr<rpc::AgentCore>& core, PassName name,
                              bool makes_plan, Deadline deadline);
  // Makes the pass count the nodes that it leads to: from all messages, or from those of its plan,
  // which must be complete.
  void count(Pass& pass, const std::vector<torch::autograd::Edge>& roots);
  // Called when the pass has succeeded here. Its gradients are part of the context from now on,
  // unless the pass is heard to have failed elsewhere. `freed`: messages whose graph the pass has
  // used up; later passes do not count them.
  void succeeded(const PassName& pass, Gradients&& gradients, const std::vector<MessageId>& freed);
  // Called when the pass has failed somewhere: discards its gradients. False if that was known.
  bool failed(const PassName& pass, const Outcome& why);
  // Notes that the worker knows that the pass has failed, or is gone. Messages from here name a
  // failed pass until all workers to be told know of it; these are at first all that take part.
  void told(PassId pass, int rank);
  // Notes that the worker `lost` is gone, and that `others` are to be told in its place.
  void untold(PassId pass, int lost, const std::set<int>& others);
  std::vector<PassId> untold() const;
  // Throws Caller if another pass of the context may not have ended on all workers: then the sum of
  // the gradients of earlier passes is not known.
  void require_no_other(const PassName& pass) const;
  std::size_t passes() const;
  void fail_passes(const Outcome& why);
  // Adds messages to the pass's plan, which is made if it is new; returns those that were not in
  // it. Throws Caller for unknown messages, Cancelled after release(), and the pass's error if it
  // has failed.
  std::vector<NodePtr<SendNode>> reach(const PassName& pass,
                                       const std::vector<MessageId>& messages);
  std::size_t plans() const;
  // At the root: the plan of an earlier pass from the same roots that has succeeded.
  using Edges = std::vector<torch::autograd::Edge>;
  std::optional<PassId> planned_for(const Edges& roots) const;
  // Called when the plan is complete. If the pass that made it succeeds, it is kept under these
  // roots until a pass without retain_graph ends.
  void remember_plan(const Edges& roots, PassId plan);

  // A backward_async() of this worker, until it has succeeded or another pass begins.
  struct Running {
    std::shared_ptr<Pass> pass;
    Future<void> ended;
  };
  void began(Running pass);
  std::vector<Running> running_here();

  // --- results; they throw Caller after release(). Gradients of passes that have succeeded here
  // count, and are discarded if such a pass fails elsewhere later.
  at::Tensor gradient(const at::Tensor& parameter);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients();

  // The outcome of a pass that has failed on this worker with `error`, at `where`.
  Outcome outcome(const std::exception_ptr& error, const std::string& where) const;

  bool released() const override { return released_; }
  // Drops everything; running passes fail with Cancelled.
  void release(const std::string& why);

 private:
  void fold() WEFT_REQUIRES(mutex_);
  struct Fresh {
    PassId pass = 0;
    Gradients gradients;
  };
  struct Plan {
    std::set<MessageId> messages;  // the messages that count
    Edges roots;  // the roots it is or will be kept under; they keep their graph alive
  };
  struct HashOfEdges {
    std::size_t operator()(const Edges& edges) const noexcept;
  };
  [[nodiscard]] Plan remember(const PassName& pass, const Outcome& outcome) WEFT_REQUIRES(mutex_);
  std::vector<PassId> to_name() const WEFT_REQUIRES(mutex_);
  std::vector<NodePtr<SendNode>> sends_in(PassId plan) const WEFT_REQUIRES(mutex_);
  void require_alive() const;
  static constexpr std::size_t kRememberedPasses = 256;

  rpc::AgentCore& core_;
  const ContextId id_;
  const std::uint64_t steps_before_;  // before the context came here
  std::atomic<bool> released_{false};
  mutable Mutex mutex_;
  std::set<int> workers_ WEFT_GUARDED_BY(mutex_);
  std::set<int> lost_ WEFT_GUARDED_BY(mutex_);  // a part of workers_
  std::map<MessageId, NodePtr<SendNode>> sends_ WEFT_GUARDED_BY(mutex_);
  std::map<PassId, std::shared_ptr<Pass>> passes_ WEFT_GUARDED_BY(mutex_);  // running
  std::set<PassId> unsettled_ WEFT_GUARDED_BY(mutex_);  // this worker's own running passes
  // By root: its passes before this one have ended.
  std::map<int, PassId> settled_ WEFT_GUARDED_BY(mutex_);
  // Failed passes, at most kMostNamed, and the workers that may not know of them.
  std::map<PassId, std::set<int>> untold_ WEFT_GUARDED_BY(mutex_);
  std::deque<PassId> endings_ WEFT_GUARDED_BY(mutex_);  // the keys of `ended_`, the oldest first
  std::map<PassId, Outcome> ended_ WEFT_GUARDED_BY(mutex_);  // the last kRememberedPasses
  std::map<PassId, Plan> plans_ WEFT_GUARDED_BY(mutex_);
  std::unordered_map<Edges, PassId, HashOfEdges> planned_ WEFT_GUARDED_BY(mutex_);
  std::uint64_t begun_ WEFT_GUARDED_BY(mutex_) = 0;  // number of passes begun here
  // Gradients of passes that have succeeded here and may still fail elsewhere, in the order in
  // which the passes began here.
  std::map<std::uint64_t, Fresh> fresh_ WEFT_GUARDED_BY(mutex_);
  Gradients gradients_ WEFT_GUARDED_BY(mutex_);
  std::vector<Running> running_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
