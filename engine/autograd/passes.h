// SPDX-License-Identifier: Apache-2.0
// The passes of one autograd context on this worker: the running ones, how the last ones have
// ended, their plans and their gradients.
//
// Owned by the context. Usable from every thread; nothing here blocks. While the mutex is held, the
// context's recording, its failed passes and a pass that has just been made may lock theirs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/context_gradients.h>
#include <weft/engine/autograd/ended_passes.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/plans.h>
#include <weft/engine/autograd/recording.h>
#include <weft/engine/future/future.h>

namespace weft::call {
class AgentCore;
}

namespace weft::autograd {

class Context;
class Pass;

class Passes {
 public:
  // `self`: the rank of this worker.
  Passes(Context& context, int self) : context_(context), self_(self), gradients_(self) {}

  struct Joined {
    std::shared_ptr<Pass> pass;  // null if the pass has ended here
    Outcome outcome;             // if the pass has ended
  };
  // Returns the pass of that name, in which this worker takes part; begins it if it is new here.
  Joined join(const std::shared_ptr<call::AgentCore>& core, const PassName& name,
              Deadline deadline);
  // Begins a pass of this worker, before any of its messages can come. Sets the pass's number, the
  // number of the oldest unsettled pass, and, if it makes a plan, the plan's number in its name.
  // Throws Caller after close().
  std::shared_ptr<Pass> begin(const std::shared_ptr<call::AgentCore>& core, PassName name,
                              bool makes_plan, Deadline deadline);
  // Makes the pass count the nodes that it leads to: from all messages, or from those of its plan,
  // which must be complete.
  void count(Pass& pass, const Edges& roots);
  // Called when the pass has succeeded here. Its gradients are part of the context from now on,
  // unless the pass is heard to have failed elsewhere. `freed`: messages whose graph the pass has
  // used up; later passes do not count them.
  void succeeded(const PassName& pass, Gradients&& gradients, const std::vector<MessageId>& freed);
  // Called when the pass has failed somewhere: discards its gradients. False if that was known.
  // Messages from here name a failed pass until all workers to be told know of it.
  bool failed(const PassName& pass, const Outcome& why);
  void fail_all(const Outcome& why);
  // The number of running passes.
  std::size_t size() const;
  // Throws Caller if another pass of the context may not have ended on all workers: then the sum of
  // the gradients of earlier passes is not known.
  void require_no_other(const PassName& pass) const;

  // --- plans
  // Adds messages to the pass's plan, which is made if it is new; returns those that were not in
  // it. Throws Caller for unknown messages, Cancelled after close(), and the pass's error if it
  // has failed.
  Recording::Sends reach(const PassName& pass, const std::vector<MessageId>& messages);
  // At the root: the plan of an earlier pass from the same roots that has succeeded.
  std::optional<PassId> planned_for(const Edges& roots) const;
  // Called when the plan is complete. If the pass that made it succeeds, it is kept under these
  // roots until a pass without retain_graph ends.
  void remember_plan(const Edges& roots, PassId plan);
  std::size_t plans() const;

  // A backward_async() of this worker, until it has succeeded or another pass begins.
  struct Running {
    std::shared_ptr<Pass> pass;
    Future<void> ended;
  };
  void began(Running pass);
  std::vector<Running> running_here();

  // --- results; they throw Caller after close(). Gradients of passes that have succeeded here
  // count, and are discarded if such a pass fails elsewhere later.
  at::Tensor gradient(const at::Tensor& parameter);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients();

  // Drops everything; running passes fail with `why`. Called once.
  void close(const Outcome& why);

 private:
  Recording::Sends sends_in(PassId plan) const WEFT_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Pass> take(PassId pass) WEFT_REQUIRES(mutex_);
  void require_alive() const WEFT_REQUIRES(mutex_);

  Context& context_;
  const int self_;
  mutable Mutex mutex_;
  bool closed_ WEFT_GUARDED_BY(mutex_) = false;
  std::map<PassId, std::shared_ptr<Pass>> running_ WEFT_GUARDED_BY(mutex_);
  std::set<PassId> unsettled_ WEFT_GUARDED_BY(mutex_);  // this worker's own running passes
  std::uint64_t begun_ WEFT_GUARDED_BY(mutex_) = 0;     // number of passes begun here
  EndedPasses ended_ WEFT_GUARDED_BY(mutex_);
  Plans plans_ WEFT_GUARDED_BY(mutex_);
  ContextGradients gradients_ WEFT_GUARDED_BY(mutex_);
  std::vector<Running> running_here_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
