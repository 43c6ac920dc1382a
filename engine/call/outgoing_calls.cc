// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <c10/core/StreamGuard.h>

#include <weft/base/make_error.h>
#include <weft/base/op.h>
#include <weft/engine/call/body.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/peer.h>
#include <weft/engine/call/wire_records.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/profiling/trace/dump.h>

// Outgoing calls, from their start to their end: a reply, an error, or the end of their time.
namespace weft::rpc {

namespace {

// At most so many calls whose time is over are remembered: a function may never answer.
constexpr std::size_t kMostLate = 4096;

// Whether a graceful shutdown waits for such calls.
bool counts(MessageKind kind) { return kind != MessageKind::Shutdown; }

// The number of calls with so few bytes is limit enough for them. They never wait, so that a short
// call on which others depend gets through.
constexpr std::uint64_t kShortCall = 4096;

// Whether this thread is the program's own and serves nothing. The calls in flight may wait for a
// thread that serves calls, runs their continuations or ends operations.
bool may_be_held_back() {
  return weft::detail::thread_executor() == nullptr && !Op::ending() && !serves_call();
}

std::vector<c10::Storage> on_gpus(const std::vector<codec::Part>& parts) {
  std::vector<c10::Storage> storages;
  for (const codec::Part& part : parts) {
    if (part.device().is_cuda()) storages.push_back(part.storage);
  }
  return storages;
}

}  // namespace

HeldBytes AgentCore::hold_back(const CallOptions& options, const Peer& worker, std::uint64_t bytes,
                               std::chrono::nanoseconds& left) {
  if (!is_users(options.kind)) return {};
  const auto& all = worker.bytes();
  if (bytes <= kShortCall || !may_be_held_back() || loop_->inside()) {
    all->take_anyway(bytes);
    return {all, bytes};
  }
  if (all->take(bytes)) return {all, bytes};
  BytesInFlight::Turn turn{bytes};
  const auto begun = Deadline::Clock::now();
  ++held_back_;
  all->wait(turn);
  thread_pool_->drive([&] { return turn.has_come || closed_; }, options.deadline(), &turn);
  --held_back_;
  if (!all->give_up(turn)) {
    if (left.count() > 0)
      left = std::max(std::chrono::nanoseconds(1),
                      left - std::chrono::nanoseconds(Deadline::Clock::now() - begun));
    return {all, bytes};
  }
  if (closed_) throw why_gone();
  throw Error(
      Blame::Timeout,
      "its " + std::to_string(bytes) + " bytes could not be sent for " +
          weft::describe(options.limit) + ", because " + std::to_string(all->taken()) +
          " bytes of other calls to that worker are unanswered; send it fewer at a time, or "
          "raise rpc::Options::bytes_in_flight (" +
          std::to_string(bytes_in_flight()) + ")");
}

std::string AgentCore::in_words(const Function* function, const std::string& to) const {
  return (function != nullptr ? function->name : "a call") + " on " + to + ", called by " +
         describe(parts_.self);
}

void AgentCore::add_waiting(std::uint64_t id, const Function& function, const CallOptions& options,
                            Deadline deadline, std::unique_ptr<PendingCall> pending,
                            Leaving leaving, std::shared_ptr<CallContext> context,
                            std::shared_ptr<SentReferences> references,
                            std::shared_ptr<CallState> here) {
  if (counts(options.kind)) {
    ++waiting_;
    ++issued_;
  }
  const trace::About shown{.name = function.name.c_str(),
                           .sequence = id,
                           .peer = options.to.rank,
                           .bytes = leaving.bytes};
  calls_.add(
      id, {coarse_now(), std::move(pending), deadline, options.limit, &function, options.to.rank,
           leaving.lane, options.kind, std::move(context), std::move(references), std::move(here),
           trace::Operation::begin(member_, trace::Kind::Call, shown),
           trace::Waiting(leaving.in_flight),
           /*note=*/{}, std::move(leaving.slot), std::move(leaving.held)});
  arm(deadline);
  // The agent may have left meanwhile, and have failed the calls that waited before this one did.
  if (closed_)
    fail(calls_.take_all(),
         [this](const WaitingCall& call) { return left(call, name_of(call.to)); });
}

// Continuations that may issue calls are handed to the thread pool before the call stops counting,
// so that an idle agent is really idle.
WaitingCall AgentCore::complete(WaitingCall call, const std::function<void(PendingCall&)>& how) {
  if (!call.pending) return call;
  call.slot = {};  // before continuations, which may need it
  try {
    how(*call.pending);
  } catch (...) {  // moving the result threw
    const auto error = std::current_exception();
    call.traced.fail(to_error(error, Blame::Remote));
    call.pending->fail(detail::thrown_by(*this, *call.function, error));
  }
  call.traced.end();
  if (counts(call.kind)) --waiting_;
  call.context = nullptr;
  call.in_flight = {};
  return call;
}

void AgentCore::fail_here(std::uint64_t id, const Error& why) {
  WaitingCall call = calls_.take(id);
  const Error error =
      (call.lane == 0 ? why : gone(why, call.to)).within(in_words(call.function, name_of(call.to)));
  call.traced.fail(error);
  forget_recorded(id, call);
  call.bytes = {};  // they have not been sent
  complete(std::move(call),
           [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(error)); });
}

void AgentCore::complete_here(std::uint64_t id, const std::function<void(PendingCall&)>& how) {
  WaitingCall call = calls_.take(id);
  if (!call.pending || !call.deadline.passed()) {
    complete(std::move(call), how);
    return;
  }
  const Error late = not_in_time(call, name_of(call.to));
  call.traced.fail(late);
  complete(std::move(call),
           [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(late)); });
}

void AgentCore::forget_recorded(std::uint64_t id, const WaitingCall& call) const {
  if (call.context) call.context->forget({parts_.self.rank, id, /*reply=*/false});
}

Error AgentCore::left(const WaitingCall& call, const std::string& to) const {
  return why_gone().within(in_words(call.function, to));
}

// The error of the calls that are pending when this agent leaves.
Error AgentCore::why_gone() const {
  if (taken_for_lost_)
    return {Blame::PeerLost, "agent " + describe(parts_.self) + " has left: " + why_left_};
  return {Blame::Cancelled, "the agent has left"};
}

Error AgentCore::not_in_time(const WaitingCall& call, const std::string& to) const {
  return Error(Blame::Timeout, in_words(call.function, to) + ": no reply within " +
                                   weft::describe(call.limit) + why_late(call) +
                                   "; rpc::to(worker).timeout(…) gives one call longer, "
                                   "rpc::Agent::set_timeout() all")
      .with_ranks({call.to});
}

// Says why a reply is late, as far as this side knows.
std::string AgentCore::why_late(const WaitingCall& call) const {
  if (call.here) {
    return call.here->has_begun
               ? "; its function still runs"
               : "; it waits for one of this worker's threads (rpc::Options::worker_threads)";
  }
  if (!call.note.empty()) return "; " + call.note;
  const auto worker = known_peer(call.to);
  const auto lane = worker ? worker->standing_lane() : Peer::Lane();
  if (!lane.connection || lane.number != call.lane) return "";
  const std::string way(lane.connection->transport());
  if (worker->has_heard_by(lane.number)) {
    return "; the connection (" + way +
           ") works: its function runs there, or waits for a thread there "
           "(rpc::Options::worker_threads of that worker)";
  }
  const bool is_of_network = way == "tcp" || way == "verbs";
  return "; nothing has come from that worker yet by " + way + " (" + lane.connection->peer() +
         "): its function runs there, " +
         (is_of_network
              ? "or the connection is not made, because a firewall drops it or the address is "
                "another machine's (set WEFT_SOCKET_IFNAME there to an interface that can be "
                "reached from here)"
              : "or its process is stopped");
}

void AgentCore::reply_came(const WorkerInfo& worker, std::uint64_t lane, Message message,
                           const Error* lacking) {
  WaitingCall call = calls_.take_of(message.head.call, worker.rank, lane);
  if (!call.pending) {  // its time was over, or the peer made it up
    bool is_forgotten = false;
    {
      std::lock_guard lock(mutex_);
      const auto found = late_.find(message.head.call);
      const auto count = forgotten_.find({worker.rank, lane});
      if (found != late_.end() && found->second.to == worker.rank && found->second.lane == lane) {
        call = std::move(found->second);
        late_.erase(found);
      } else if (count !=
                 forgotten_.end()) {  // counted, so that no peer can make up any number of them
        is_forgotten = true;
        if (--count->second == 0) forgotten_.erase(count);
      }
    }
    if (call.pending) return late_reply_came(call, worker, std::move(message), lacking);
    // The references in it would never end otherwise.
    if (is_forgotten && message.head.kind != FrameKind::Failure) {
      references_->give_back_reply(worker.rank, message.head.call);
    }
    return;
  }
  call.bytes = {};
  if (call.deadline.passed()) {  // it is late even if it was faster than the timer
    const Error late = not_in_time(call, describe(worker));
    call.traced.fail(late);
    forget_recorded(message.head.call, call);
    call = complete(std::move(call),
                    [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(late)); });
    return late_reply_came(call, worker, std::move(message), lacking);
  }
  const bool failure = message.head.kind == FrameKind::Failure;
  const Function* function = call.function;
  auto traced = std::exchange(call.traced, {});
  traced.add(bytes_of(message));
  const auto context = call.context;
  const auto given = call.references;
  complete(std::move(call), [&](PendingCall& pending) {
    try {
      if (lacking != nullptr) throw *lacking;
      const auto read = [&](ReceivedReferences& references) {
        const c10::MultiStreamGuard streams(message.streams);
        const auto enqueued = [&, storages = on_gpus(message.parts)] {
          return parts_.devices->work(message.streams, storages);
        };
        codec::Reader reader(std::move(message.parts), &references);
        if (context && !context->released()) {
          reader.tensors().attach_gradients(
              context->receiver({parts_.self.rank, message.head.call, /*reply=*/true}, worker));
        }
        reader.tensors().on_computed([&](const at::Tensor& result) {
          contexts_->note_computed(result, describe(worker), function->name);
        });
        reader.read(message.body, [&](const msgpack::object& object) {
          if (!failure) {
            pending.succeed(object, std::ref(enqueued));  // which allocates nothing
            return traced.end();
          }
          const auto record = object.as<FailureRecord>();
          const Blame blame = blame_from(record.blame);
          if (record.what == static_cast<int>(Failure::Unread) && given) given->undo();
          if (record.what == static_cast<int>(Failure::Thrown)) {
            throw RemoteError(worker.name, function->name, record.text, record.ranks);
          }
          if (record.what == static_cast<int>(Failure::NotCreated)) {
            throw CreationError(Error(blame, record.text).with_ranks(record.ranks));
          }
          throw Error(blame, "calling " + function->name + " [" + function->signature + "] on " +
                                 describe(worker) + ": " + record.text)
              .with_ranks(record.ranks);
        });
      };
      references_->with_references_from(worker.rank, std::ref(read));
    } catch (...) {
      auto error = std::current_exception();
      if (!failure && lacking == nullptr) {
        const Error why = to_error(error, Blame::Caller);
        error = std::make_exception_ptr(
            why.within(in_words(function, describe(worker)) + ": its result cannot be decoded"));
      }
      traced.fail(to_error(error, Blame::Remote));
      // Before it is known to have failed.
      if (context)
        context->forget({parts_.self.rank, message.head.call,
                         /*reply=*/false});
      if (!failure) references_->give_back_reply(worker.rank, message.head.call);
      pending.fail(error);
    }
  });
}

// Reads a reply that nobody waits for, so that the references in it end as all do: here, and with
// their owners. A reply that cannot be read, or that was recorded in a context, ends where it was
// sent.
void AgentCore::late_reply_came(const WaitingCall& call, const WorkerInfo& worker, Message message,
                                const Error* lacking) {
  const auto give_back = [&] { references_->give_back_reply(worker.rank, message.head.call); };
  if (lacking != nullptr) return give_back();
  try {
    const auto read = [&](ReceivedReferences& references) {
      const c10::MultiStreamGuard streams(message.streams);
      const bool failure = message.head.kind == FrameKind::Failure;
      codec::Reader(std::move(message.parts), &references)
          .read(message.body, [&](const msgpack::object& object) {
            if (!failure)
              return call.pending->succeed(object, [] { return weft::detail::DeviceWorkRef(); });
            if (object.as<FailureRecord>().what == static_cast<int>(Failure::Unread) &&
                call.references)
              call.references->undo();
          });
    };
    references_->with_references_from(worker.rank, std::ref(read));
  } catch (...) {
    return give_back();
  }
  if (message.head.context != 0) give_back();
}

std::vector<PendingCalls::Taken> AgentCore::fail(
    std::vector<PendingCalls::Taken> calls, const std::function<Error(const WaitingCall&)>& why) {
  std::vector<Error> errors;
  errors.reserve(calls.size());
  for (auto& [id, call] : calls) call.traced.fail(errors.emplace_back(why(call)));
  // One dump, after all errors are recorded: an error within a second of a dump causes no other.
  const auto worst = std::find_if(errors.begin(), errors.end(), &trace::is_worth_a_dump);
  if (worst != errors.end()) trace::dump_after("a call", *worst);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    auto& [id, call] = calls[i];
    forget_recorded(id, call);
    if (call.here) call.here->cancelled = true;
    call = complete(std::move(call), [&](PendingCall& pending) {
      pending.fail(std::make_exception_ptr(errors[i]));
    });
  }
  return calls;
}

// All calls share one timer. It fires at the earliest deadline and looks for calls whose time is
// over.
void AgentCore::arm(Deadline deadline) {
  if (deadline.point() >= armed_.load()) return;
  std::lock_guard lock(mutex_);
  if (deadline.point() >= armed_.load() || closed_) return;
  armed_ = deadline.point();
  timer_ = loop_->at(deadline, Task([weak = weak_from_this()] {
                       if (const auto core = weak.lock()) core->expire();
                     }));
}

void AgentCore::expire() {
  armed_ = Deadline::Clock::time_point::max();
  Deadline next = Deadline::never();
  auto expired = calls_.take_expired(Deadline::Clock::now(), next);
  arm(next);
  for (const auto& [id, call] : expired) {
    const auto worker = known_peer(call.to);
    const auto lane = worker ? worker->standing_lane() : Peer::Lane();
    if (!lane.connection || lane.number != call.lane)
      continue;  // the connection has ended, and the call with it
    Head head;
    head.kind = FrameKind::Cancel;
    head.call = id;
    lane.pass([connection = lane.connection, head] { send_message(*connection, head, {}); });
  }
  expired = fail(std::move(expired),
                 [&](const WaitingCall& call) { return not_in_time(call, name_of(call.to)); });
  std::vector<WaitingCall> dropped;  // destroyed outside the lock: free bytes wake others
  std::lock_guard lock(mutex_);
  for (auto& [id, call] : expired) {
    if (call.lane != 0 && is_users(call.kind)) late_.emplace(id, std::move(call));
  }
  while (late_.size() > kMostLate) {
    const auto oldest = late_.begin();
    ++forgotten_[{oldest->second.to, oldest->second.lane}];
    dropped.push_back(std::move(oldest->second));
    late_.erase(oldest);
  }
}

}  // namespace weft::rpc
