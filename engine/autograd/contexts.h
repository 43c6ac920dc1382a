// SPDX-License-Identifier: Apache-2.0
// The autograd contexts that one agent knows. Thread-safe; nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/call/extension.h>

namespace weft::call {
class AgentCore;
}

namespace weft::autograd {

class Context;

class Contexts final : public call::ContextExtension {
 public:
  explicit Contexts(call::AgentCore& core) : core_(core) {}
  ~Contexts() override;

  // Makes a new context of this worker.
  std::shared_ptr<Context> make();
  PassId next_pass();
  // Called when a call made in that context has arrived from rank `from`. Null if the context has
  // been released.
  std::shared_ptr<call::CallContext> arrived(ContextId id, int from) override;
  // Null if it is not known here.
  std::shared_ptr<Context> find(ContextId id) const;
  // True if the context was known here, or another worker named it, and it has ended.
  bool has_ended(ContextId id) const;
  // Ends the context here and on the workers that it was passed to, which do the same. Does nothing
  // if it has ended.
  void release(ContextId id, const std::string& why);
  // Called when a worker cannot be reached any more, or has left and a worker of generation
  // `successor` has its rank: passes that it takes part in fail, and its own contexts end.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) override;
  // True if any context knows the worker.
  bool concerns(int rank) const override;
  // Called when the receiver could not read the message: drops it from the context that recorded
  // it.
  void forget(const MessageId& message) override;
  // Called when the agent ends.
  void close() override;

  // Orders the optimizer steps on this worker, except those that may overlap with others.
  struct Steps {
    Mutex mutex;  // held during a step
    Fence last;   // passes when the last step's work on GPUs has run
  };
  Steps& steps() { return steps_; }
  // Called before an optimizer steps here, in that context.
  void steps_in(ContextId id);
  // The number of steps so far.
  std::uint64_t step_count() const;
  // The other context in which an optimizer has stepped here most recently, if its step came after
  // step number `since`; nullopt otherwise.
  std::optional<ContextId> stepped_by_other(ContextId id, std::uint64_t since) const;

  std::shared_ptr<call::CallContext> current() const override;
  bool records_calls() const override;
  void tell_ended(int worker, ContextId context) override;
  void note_computed(const at::Tensor& result, const std::string& worker,
                     const std::string& function) const override;
  IsComputed is_computed() const override;
  void count(rpc::DebugInfo& info) const override;

 private:
  std::uint64_t next_id();
  std::vector<std::shared_ptr<Context>> all() const;
  static constexpr std::size_t kMostBurials = 1 << 16;

  call::AgentCore& core_;
  std::atomic<std::uint64_t> next_{1};
  Steps steps_;
  mutable Mutex mutex_;
  std::unordered_map<ContextId, std::shared_ptr<Context>> contexts_ WEFT_GUARDED_BY(mutex_);
  // Contexts that have ended; a late message must not bring them back.
  std::unordered_set<ContextId> buried_ WEFT_GUARDED_BY(mutex_);
  std::deque<ContextId> burials_ WEFT_GUARDED_BY(mutex_);
  struct Stepped {
    ContextId context = 0;
    std::uint64_t number = 0;  // from 1
  };
  Stepped last_step_ WEFT_GUARDED_BY(mutex_){};
  Stepped step_of_other_
      WEFT_GUARDED_BY(mutex_){};  // the newest of another context than the last step's
};

// The agent's own.
Contexts& contexts_of(call::AgentCore& core);

}  // namespace weft::autograd
