// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/autograd/lost_gradients.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/numbers.h>

namespace weft::autograd {

Contexts::~Contexts() = default;

std::uint64_t Contexts::next_id() { return core_.identity().id_of(next_++); }

PassId Contexts::next_pass() { return next_id(); }

std::shared_ptr<Context> Contexts::make() {
  auto context = std::make_shared<Context>(core_, next_id(), step_count());
  MutexLock lock(mutex_);
  contexts_.emplace(context->id(), context);
  return context;
}

std::shared_ptr<call::CallContext> Contexts::arrived(ContextId id, int from) {
  std::shared_ptr<Context> context;
  {
    MutexLock lock(mutex_);
    if (buried_.contains(id)) return nullptr;
    auto& entry = contexts_[id];
    if (!entry) entry = std::make_shared<Context>(core_, id, last_step_.number);
    context = entry;
  }
  context->recording().add_worker(from);
  return context;
}

void Contexts::steps_in(ContextId id) {
  MutexLock lock(mutex_);
  if (last_step_.context != id) step_of_other_ = last_step_;
  last_step_ = {id, last_step_.number + 1};
}

std::uint64_t Contexts::step_count() const {
  MutexLock lock(mutex_);
  return last_step_.number;
}

std::optional<ContextId> Contexts::stepped_by_other(ContextId id, std::uint64_t since) const {
  MutexLock lock(mutex_);
  const Stepped& other = last_step_.context != id ? last_step_ : step_of_other_;
  if (other.number <= since) return std::nullopt;
  return other.context;
}

std::shared_ptr<Context> Contexts::find(ContextId id) const {
  MutexLock lock(mutex_);
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : found->second;
}

void Contexts::release(ContextId id, const std::string& why) {
  std::shared_ptr<Context> context;
  {
    MutexLock lock(mutex_);
    // A context that is unknown here is recorded too: the call that would bring it may arrive
    // later.
    if (const auto found = contexts_.find(id); found != contexts_.end()) {
      context = std::move(found->second);
      contexts_.erase(found);
    }
    if (buried_.insert(id).second) burials_.push_back(id);
    if (burials_.size() > kMostBurials) {
      buried_.erase(burials_.front());
      burials_.pop_front();
    }
  }
  if (!context) return;
  context->release(why);
  if (core_.closed()) return;
  for (const int rank : context->recording().workers()) {
    if (rank != core_.self().rank) messages::clean_up(core_.shared_from_this(), rank, id);
  }
}

std::vector<std::shared_ptr<Context>> Contexts::all() const {
  std::vector<std::shared_ptr<Context>> all;
  MutexLock lock(mutex_);
  for (const auto& [id, context] : contexts_) all.push_back(context);
  return all;
}

void Contexts::forget(const MessageId& message) {
  for (const auto& context : all()) context->forget(message);
}

bool Contexts::concerns(int rank) const {
  for (const auto& context : all()) {
    if (context->recording().concerns(rank)) return true;
  }
  return false;
}

void Contexts::worker_lost(int rank, std::optional<std::uint16_t> successor) {
  const std::string why = core_.connections().name_of(rank) + " is lost";
  std::set<int> owners;  // they would have told the lost worker, which would have told us
  for (const auto& context : all()) {
    const call::WorkerGeneration owner = call::made_by(context->id());
    if (owner.rank == rank && successor && !owner.is_before(*successor)) continue;
    const bool took_part = context->recording().worker_lost(rank);
    if (took_part) {
      context->passes().fail_all(
          Outcome(Error(Blame::PeerLost, "backward in context " + to_text(context->id()) +
                                             " failed on " + describe(core_.self()) + ": " + why)
                      .with_ranks({rank})));
    }
    if (context->owner() == rank) {
      // Not here, since this may be the loop's thread: it destroys whole graphs.
      core_.thread_pool()->run(Task([core = core_.shared_from_this(), id = context->id(), why] {
        contexts_of(*core).release(id, why);
      }));
    } else if (took_part) {
      owners.insert(context->owner());
    }
  }
  for (const int owner : owners) core_.liveness().look_after(owner);
}

void Contexts::close() {
  std::vector<std::shared_ptr<Context>> contexts = all();
  {
    MutexLock lock(mutex_);
    contexts_.clear();
  }
  for (const auto& context : contexts)
    context->release("agent " + describe(core_.self()) + " has left");
}

bool Contexts::has_ended(ContextId id) const {
  MutexLock lock(mutex_);
  return buried_.contains(id);
}

std::shared_ptr<call::CallContext> Contexts::current() const {
  auto context = current_context();
  return context && context->belongs_to(core_) ? context : nullptr;
}

bool Contexts::records_calls() const { return autograd::records_calls(); }

void Contexts::tell_ended(int worker, ContextId context) {
  messages::clean_up(core_.shared_from_this(), worker, context);
}

void Contexts::note_computed(const at::Tensor& result, const std::string& worker,
                             const std::string& function) const {
  warn_where_gradients_end(result, worker, function);
}

call::ContextExtension::IsComputed Contexts::is_computed() const { return &autograd::is_computed; }

void Contexts::count(rpc::DebugInfo& info) const {
  for (const auto& context : all()) {
    ++info.contexts;
    info.backward_passes += context->passes().size();
  }
}

Contexts& contexts_of(call::AgentCore& core) {
  return static_cast<Contexts&>(core.extensions().contexts());
}

}  // namespace weft::autograd
