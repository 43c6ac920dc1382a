// What one worker knows of one autograd context: the messages recorded in it, whom it was passed
// to, its passes and the gradients that they brought. Usable from every thread.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/edge.h>

#include <weft/base/deadline.h>
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

// A failure as it travels on: its blame, and what the function said without the names around it.
Outcome outcome_of(const std::exception_ptr& error);

class Context final : public rpc::CallContext, public std::enable_shared_from_this<Context> {
 public:
  // `steps`: how many steps of optimizers there have been on this worker.
  Context(rpc::AgentCore& core, ContextId id, std::uint64_t steps = 0)
      : core_(core), id_(id), steps_before_(steps) {}
  ContextId id() const override { return id_; }
  std::shared_ptr<rpc::AgentCore> core() const;
  // The rank of the worker that made it.
  int owner() const { return static_cast<int>(id_ >> 48); }
  bool belongs_to(const rpc::AgentCore& core) const { return &core_ == &core; }

  // --- recording
  // That worker takes part: it was called from here, or called here.
  void add_worker(int rank);
  // It has ended the context by itself: nobody needs to tell it.
  void remove_worker(int rank);
  std::set<int> workers() const;
  // It cannot be reached any more, until it is heard of again. Whether it took part.
  bool worker_lost(int rank);
  bool has_lost(int rank) const;
  // Whether it takes part, as far as this worker knows, or has made it.
  bool concerns(int rank) const;
  // A message with these tensors goes to that worker; nothing where there are none.
  void sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) override;
  // It was not sent, or its call failed: no gradient will come for it.
  void forget(const MessageId& message) override;
  // For the tensors of a message that comes.
  codec::AttachGradient receiver(const MessageId& message, const rpc::WorkerInfo& from) override;
  // Null where there is none.
  NodePtr<SendNode> send_of(const MessageId& message) const;
  std::vector<NodePtr<SendNode>> sends() const;

  // --- passes
  struct Joined {
    std::shared_ptr<Pass> pass;  // null where it has ended here
    Outcome outcome;             // if it has ended
  };
  // The pass of that name, in which this worker is known to take part; begun if it is new here.
  Joined join(const std::shared_ptr<rpc::AgentCore>& core, const PassName& name, Deadline deadline);
  // One of this worker's own, before any message of it can come. Its number and what has been
  // settled before it become the name's, and the number that of its plan, if it makes one. Throws
  // Caller after release().
  std::shared_ptr<Pass> begin(const std::shared_ptr<rpc::AgentCore>& core, PassName name,
                              bool makes_plan, Deadline deadline);
  // That pass counts what it leads to: all messages, or those of its plan, which is known by now.
  void count(Pass& pass, const std::vector<torch::autograd::Edge>& roots);
  // It has ended well here: its gradients are the context's from now on, unless it is heard to have
  // failed elsewhere. `freed`: messages whose graph it has used up; no later pass counts them.
  void succeeded(const PassName& pass, Gradients&& gradients, const std::vector<MessageId>& freed);
  // It has failed somewhere; what it brought is discarded. False where that was known.
  bool failed(const PassName& pass, const Outcome& why);
  // That worker knows that the pass has failed, or is gone. This one's messages name a pass that
  // has failed until all whom it should tell know of it: at first all that take part.
  void told(PassId pass, int rank);
  // That worker is gone, and these are to be told in its place.
  void untold(PassId pass, int lost, const std::set<int>& others);
  std::vector<PassId> untold() const;
  // Throws Caller where another pass of the context may have begun and is not known to have ended
  // everywhere, or where this worker cannot tell: the sum of gradients of earlier passes is not
  // known then.
  void require_no_other(const PassName& pass) const;
  std::size_t passes() const;
  void fail_passes(const Outcome& why);
  // Adds messages to the pass's plan, which is made if it is new; gives those that are new in it.
  // Throws Caller for unknown ones, Cancelled after release(), and what the pass has failed with.
  std::vector<NodePtr<SendNode>> reach(const PassName& pass,
                                       const std::vector<MessageId>& messages);
  std::size_t plans() const;
  // At the root: the plan of a pass from the same roots that has ended well.
  using Edges = std::vector<torch::autograd::Edge>;
  std::optional<PassId> planned_for(const Edges& roots) const;
  // The plan is whole. It is kept under these roots if the pass that made it ends well, until one
  // without retain_graph ends.
  void remember_plan(const Edges& roots, PassId plan);

  // backward_async() of this worker, until it has ended well, or another pass begins.
  struct Running {
    std::shared_ptr<Pass> pass;
    Future<void> ended;
  };
  void began(Running pass);
  std::vector<Running> running_here();

  // --- results; Caller after release(). What passes have brought that have ended here counts; if
  // they fail elsewhere later it is discarded as ever.
  at::Tensor gradient(const at::Tensor& parameter);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients();

  // What a pass has failed with on this worker, doing that.
  Outcome outcome(const std::exception_ptr& error, const std::string& where) const;

  bool released() const override { return released_; }
  // Drops everything; passes that run fail with Cancelled.
  void release(const std::string& why);

 private:
  void fold();
  struct Fresh {
    PassId pass = 0;
    Gradients gradients;
  };
  struct Plan {
    std::set<MessageId> messages;  // that count
    Edges roots;                   // that it is kept for, or to be; it keeps their graph alive
  };
  struct HashOfEdges {
    std::size_t operator()(const Edges& edges) const noexcept;
  };
  [[nodiscard]] Plan remember(const PassName& pass, const Outcome& outcome);
  std::vector<PassId> to_name() const;
  std::vector<NodePtr<SendNode>> sends_in(PassId plan) const;
  void require_alive() const;
  static constexpr std::size_t kRememberedPasses = 256;

  rpc::AgentCore& core_;
  const ContextId id_;
  const std::uint64_t steps_before_;  // it came here
  std::atomic<bool> released_{false};
  mutable std::mutex mutex_;  // of the rest
  std::set<int> workers_;
  std::set<int> lost_;  // of those
  std::map<MessageId, NodePtr<SendNode>> sends_;
  std::map<PassId, std::shared_ptr<Pass>> passes_;  // that run
  std::set<PassId> unsettled_;                      // of this worker's own, that run
  std::map<int, PassId> settled_;                   // the last that was heard, by root
  std::map<PassId, std::set<int>>
      untold_;                       // that have failed, and who may not know; kMostNamed at most
  std::deque<PassId> endings_;       // the oldest first, of the next
  std::map<PassId, Outcome> ended_;  // the last ones
  std::map<PassId, Plan> plans_;
  std::unordered_map<Edges, PassId, HashOfEdges> planned_;
  std::uint64_t begun_ = 0;  // passes, here
  std::map<std::uint64_t, Fresh>
      fresh_;  // of those that have ended here, and may yet fail elsewhere; as they began here
  Gradients gradients_;
  std::vector<Running> running_;
};

}  // namespace weft::autograd
