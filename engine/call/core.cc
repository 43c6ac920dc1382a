// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <optional>
#include <utility>

#include <weft/base/inheritance.h>
#include <weft/engine/call/call_errors.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/fixed_job.h>

namespace weft::call {

namespace {

trace::Member member_of(const WorkerInfo& self) {
  return trace::Member::join({"agent", self.name, self.rank, {}});
}

}  // namespace

AgentCore::AgentCore(const Parts& parts)
    : lifetime_(identity_.self, parts.kept),
      identity_{.self = parts.self,
                .world_size = parts.world_size,
                .member = parts.self.rank < 0 ? trace::Member() : member_of(parts.self)},
      options_(parts.options),
      devices_(parts.devices, identity_.self, options_),
      loop_(std::make_shared<EventLoop>("rpc " + parts.self.name, EventLoop::Thread::Given)),
      connections_(*this),
      thread_pool_(ThreadPool::make(parts.self.name, options_.worker_threads, loop_)),
      directory_(parts.store, parts.self, parts.world_size, devices_.described()),
      extensions_(parts.make_references(*this), parts.make_contexts(*this)),
      pauses_(*this),
      outgoing_calls_(*this),
      incoming_calls_(*this),
      liveness_(*this),
      members_(*this, parts.announcements),
      shutdown_(*this) {}

std::shared_ptr<AgentCore> AgentCore::make(const Parts& parts, const std::string& local_address,
                                           Deadline deadline) {
  std::shared_ptr<AgentCore> core(new AgentCore(parts));
  core->join(parts, local_address, deadline);
  return core;
}

void AgentCore::join(const Parts& parts, const std::string& local_address, Deadline deadline) {
  std::vector<transport::Offer> offers;
  std::vector<transport::Offer> device_offers;
  // The store refuses the token. This worker joins nevertheless, so that the others learn of its
  // secret, and throws then.
  std::optional<Error> forged;
  try {
    try {
      identity_.token = directory_.token(deadline);
    } catch (const Error& error) {
      if (!identity_.world_size || error.blame() != Blame::Caller) throw;
      forged = error;
    }
    offers = connections_.listen(local_address, /*carries_devices=*/false);
    // A connection that carries device memory must be made so at both ends, and the maps of the
    // other workers are not known yet.
    if (tensor::CudaDevices::built())
      device_offers = connections_.listen(local_address, /*carries_devices=*/true);
  } catch (...) {
    if (identity_.world_size) give_up_rank(*parts.store, self().rank);
    throw;
  }
  const long announcements = identity_.world_size ? 0 : announced(*parts.store);
  if (forged) deadline = Deadline::sooner(deadline, Deadline::in(kOthersCome));
  try {
    identity_.generation = directory_.join(
        offers, device_offers, deadline,
        [this](const Directory::Entry& worker, Deadline limit) {
          return liveness_.knock(worker, limit);
        },
        options_.wait_reports);
  } catch (const Error& error) {
    if (!forged || error.blame() != Blame::Timeout) throw;
  }
  if (forged) throw Error(*forged);
  if (self().rank < 0) {
    identity_.self = directory_.self();
    identity_.member = member_of(identity_.self);
  }
  devices_.prepare(directory_.gpus());
  members_.begin();
  connections_.begin();
  loop_->post(Task([weak = weak_from_this()] {
    if (const auto core = weak.lock()) core->outgoing_calls().awaited().look();
  }));
  if (!identity_.world_size) members_.follow(announcements);
}

AgentCore::~AgentCore() {
  leave();
  if (loop_->inside()) devices_.end_without_waiting();
}

void AgentCore::leave() noexcept {
  if (lifetime_.is_inherited()) {
    if (lifetime_.close()) loop_->close_inherited();
    return keep_inherited(shared_from_this());
  }
  if (!lifetime_.close()) return;
  loop_->recall();  // wakes threads that wait in shutdown() for others
  auto follower = members_.stop_following();
  directory_.leave();
  follower = nullptr;
  members_.close_news();
  // Nothing is added to these any more. They are destroyed when all threads have ended.
  const auto connections = connections_.take_all();
  const auto waiting_for_verdict = shutdown_.take_waiting();
  const auto expired = outgoing_calls_.waiting().expired().take_all();
  const auto pauses = pauses_.take_all();
  const auto timer = outgoing_calls_.waiting().take_timer();
  connections_.stop_listening();
  extensions_.close();
  const Error why(Blame::Cancelled, "agent " + describe(self()) + " has left");
  for (const auto& [rank, one] : waiting_for_verdict) one.verdict.set_error(why);
  outgoing_calls_.waiting().fail_all([&](const WaitingCall& call) {
    const auto found = connections.peers.find(call.to);
    return left(*this, call,
                found != connections.peers.end() ? describe(found->second->worker())
                                                 : connections_.name_of(call.to));
  });
  connections.close(why);
  // Connections end in a turn of the loop, and nobody turns it once the thread pool has stopped.
  // Connections that a call still holds would stay open, and their peers would wait.
  if (!thread_pool_->inside()) {
    auto turned = std::make_shared<std::atomic<bool>>(false);
    loop_->post([turned] { *turned = true; });
    thread_pool_->drive([turned] { return turned->load(); }, Deadline::in(std::chrono::seconds(1)));
  }
  thread_pool_->stop();
  extensions_.close();  // again, for calls that came or ran while the rest ended
  lifetime_.keep_until_left(nullptr);
}

DebugInfo AgentCore::debug_info() {
  DebugInfo info;
  info.calls_waiting = outgoing_calls_.waiting().count();
  info.calls_served = incoming_calls_.served();
  info.handlers_busy = incoming_calls_.running();
  info.calls_held_back = outgoing_calls_.held_back();
  extensions_.count(info);
  return info;
}

}  // namespace weft::call
