// The autograd contexts that one agent knows. Usable from every thread; nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <weft/base/fence.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/call/extension.h>

namespace weft::rpc {
class AgentCore;
}

namespace weft::autograd {

class Context;

class Contexts final : public rpc::ContextExtension {
 public:
  explicit Contexts(rpc::AgentCore& core) : core_(core) {}
  ~Contexts() override;

  // A new one, of this worker.
  std::shared_ptr<Context> make();
  PassId next_pass();
  // A call made in that context has come from that worker. Null where the context has been
  // released.
  std::shared_ptr<rpc::CallContext> arrived(ContextId id, int from) override;
  // Null where it is not known here.
  std::shared_ptr<Context> find(ContextId id) const;
  // Whether it was known here, or others told of it, and it has ended since.
  bool has_ended(ContextId id) const;
  // Ends it here, and on the workers that it was passed to, which do the same. Nothing where it has
  // ended.
  void release(ContextId id, const std::string& why);
  // A worker cannot be reached any more: passes that it takes part in fail, its own contexts end.
  // Or it has left, and one of that life is its successor.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) override;
  // Whether any context knows it.
  bool concerns(int rank) const override;
  // In whichever it is recorded: its receiver could not read it.
  void forget(const MessageId& message) override;
  // The agent ends.
  void close() override;

  // Steps of optimizers on this worker, but for those that may overlap with others.
  struct Steps {
    std::mutex mutex;  // held by who steps
    Fence last;        // what the last of them has enqueued on GPUs has run
  };
  Steps& steps() { return steps_; }
  // An optimizer is about to step here, in that context.
  void steps_in(ContextId id);
  // How many steps there have been so far.
  std::uint64_t step_count() const;
  // Another context in which an optimizer has stepped here since there were so many: the newest.
  // Nothing where there is none.
  std::optional<ContextId> stepped_by_other(ContextId id, std::uint64_t since) const;

  std::shared_ptr<rpc::CallContext> current() const override;
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

  rpc::AgentCore& core_;
  std::atomic<std::uint64_t> next_{1};
  Steps steps_;
  mutable std::mutex mutex_;  // of the rest
  std::unordered_map<ContextId, std::shared_ptr<Context>> contexts_;
  // Those that have ended: a message that is late does not bring them back.
  std::unordered_set<ContextId> buried_;
  std::deque<ContextId> burials_;
  struct Stepped {
    ContextId context = 0;
    std::uint64_t number = 0;  // from 1
  };
  Stepped last_step_{};
  Stepped step_of_other_{};  // the newest that is of another context than the last one's
};

// The agent's own.
Contexts& contexts_of(rpc::AgentCore& core);

}  // namespace weft::autograd
