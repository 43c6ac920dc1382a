// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/op.h>
#include <weft/engine/call/call_errors.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/outgoing_calls.h>
#include <weft/engine/codec/sent_bytes.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

// The number of calls with so few bytes is limit enough for them. They never wait, so that a short
// call on which others depend gets through.
constexpr std::uint64_t kShortCall = 4096;

// Whether this thread is the program's own and serves nothing. The calls in flight may wait for a
// thread that serves calls, runs their continuations or ends operations.
bool may_be_held_back() {
  return weft::detail::thread_executor() == nullptr && !Op::ending() && !serves_call();
}

}  // namespace

std::chrono::milliseconds usable_limit(std::chrono::milliseconds given, const std::string& what) {
  if (given.count() < 0) {
    throw Error(Blame::Caller,
                what + " is " + weft::describe(given) + "; it must be positive, or 0 for no limit");
  }
  return given == kNoTimeout ? std::chrono::milliseconds(0)
                             : std::min(given, group::kLongestTimeout);
}

struct OutgoingCalls::Sending {
  const Function& function;
  const CallOptions& options;
  const std::shared_ptr<Peer> worker;
  const std::shared_ptr<SentReferences> references;
  const std::shared_ptr<CallContext> context;  // in which the call is made; null for none
  Slot slot;
  std::chrono::nanoseconds left = options.limit;
  std::shared_ptr<Outgoing> message{};
  std::vector<at::Tensor> recorded{};  // the arguments that require gradients
  HeldBytes held{};

  Error named(AgentCore& core, const Error& error) const {
    return error.within(in_words(core, &function, describe(worker->worker())));
  }
};

OutgoingCalls::OutgoingCalls(AgentCore& core)
    : core_(core),
      own_calls_(trace::depth(trace::Queue::Calls, core.self().name)),
      timeout_(core.options().timeout.count()),
      waiting_(core),
      awaited_(core) {}

Recipient OutgoingCalls::recipient(const Destination& destination) {
  core_.lifetime().require_open();
  return std::visit([this](const auto& target) { return core_.directory().recipient(target); },
                    destination.target());
}

std::chrono::milliseconds OutgoingCalls::limit_of(const Destination& destination) const {
  const auto given = destination.timeout();
  return given && *given != kAgentTimeout ? usable_limit(*given, "a call's time limit") : timeout();
}

void OutgoingCalls::set_timeout(std::chrono::milliseconds limit) {
  timeout_ = usable_limit(limit, "the time limit of calls").count();
}

std::uint64_t OutgoingCalls::next_id() { return core_.identity().first_id() + next_++; }

// Users' calls carry the context in which they are made. Weft's own calls carry none.
std::shared_ptr<CallContext> OutgoingCalls::context_of(const CallOptions& options) const {
  return is_users(options.kind) ? core_.extensions().contexts().current() : nullptr;
}

std::shared_ptr<const Member> OutgoingCalls::send(const Function& function,
                                                  const CallOptions& options,
                                                  const std::function<void(codec::Packer&)>& pack,
                                                  std::unique_ptr<PendingCall> pending) {
  core_.lifetime().require_open();
  const auto worker = core_.connections().peer(options.to);
  std::shared_ptr<const Member> callee(worker, &worker->member());
  const int most = core_.options().calls_in_flight;
  Sending call{function,
               options,
               worker,
               core_.extensions().references().references_to(
                   Recipient(options.to.rank, worker->generation())),
               context_of(options),
               is_users(options.kind) ? Slot::take(worker->unanswered(), most) : Slot()};
  if (is_users(options.kind) && !call.slot) {
    const Error full(Blame::Busy,
                     std::to_string(most) +
                         " calls to it are unanswered; wait for some before issuing more, or raise "
                         "rpc::Options::calls_in_flight of both workers");
    pending->fail(std::make_exception_ptr(call.named(core_, full)));
    return callee;
  }
  Peer::Numbered connection;
  try {
    this->pack(call, pack);
    try {
      hold_back(call);
    } catch (const Error& error) {
      call.references->undo();
      pending->fail(std::make_exception_ptr(call.named(core_, error)));
      return callee;
    }
    connection = connect(call);
  } catch (...) {
    call.references->undo();
    throw;
  }
  const Head head = enter(call, connection, std::move(pending));
  post(call, connection, head);
  return callee;
}

void OutgoingCalls::pack(Sending& call, const std::function<void(codec::Packer&)>& pack) const {
  codec::Writer writer(call.references.get());
  if (call.context && core_.extensions().contexts().records_calls())
    writer.tensors().record_gradients();
  if (is_users(call.options.kind) && config().debug == DebugLevel::Detail) writer.tensors().watch();
  const Peer& worker = *call.worker;
  call.message = std::make_shared<Outgoing>(core_.devices().address(
      writer.write(pack), call.options.back ? worker.map_back() : worker.map(), worker.worker(),
      call.options.back ? Way::Back : Way::Call));
  if (call.context) call.recorded = writer.tensors().take_recorded();
}

void OutgoingCalls::hold_back(Sending& call) {
  if (!is_users(call.options.kind)) return;
  const std::uint64_t bytes = bytes_of(call.message->message);
  const auto& all = call.worker->bytes();
  if (bytes <= kShortCall || !may_be_held_back() || core_.loop()->inside()) {
    all->take_anyway(bytes);
    call.held = {all, bytes};
    return;
  }
  if (all->take(bytes)) {
    call.held = {all, bytes};
    return;
  }
  BytesInFlight::Turn turn{bytes};
  const auto begun = Deadline::Clock::now();
  ++held_back_;
  all->wait(turn);
  core_.thread_pool()->drive([&] { return turn.has_room || core_.closed(); },
                             call.options.deadline(), &turn);
  --held_back_;
  if (!all->give_up(turn)) {
    if (call.left.count() > 0)
      call.left = std::max(std::chrono::nanoseconds(1),
                           call.left - std::chrono::nanoseconds(Deadline::Clock::now() - begun));
    call.held = {all, bytes};
    return;
  }
  if (core_.closed()) throw core_.lifetime().why_gone();
  throw Error(
      Blame::Timeout,
      "its " + std::to_string(bytes) + " bytes could not be sent for " +
          weft::describe(call.options.limit) + ", because " + std::to_string(all->taken()) +
          " bytes of other calls to that worker are unanswered; send it fewer at a time, or "
          "raise rpc::Options::bytes_in_flight (" +
          std::to_string(static_cast<std::uint64_t>(core_.options().bytes_in_flight)) + ")");
}

Peer::Numbered OutgoingCalls::connect(const Sending& call) {
  try {
    return core_.connections().connect(*call.worker);
  } catch (const Error& error) {
    throw call.named(core_, error);
  }
}

// Enters the call into the table of waiting calls, and returns the head of its message.
Head OutgoingCalls::enter(Sending& call, const Peer::Numbered& connection,
                          std::unique_ptr<PendingCall> pending) {
  const CallOptions& options = call.options;
  Head head;
  head.kind = FrameKind::Call;
  head.flags = (options.on_loop ? kOnLoop : 0) |
               (core_.extensions().contexts().records_calls() ? 0 : kNoGrad);
  head.message = static_cast<std::uint8_t>(options.kind);
  head.call = next_id();
  // Before the call waits, because failing the call forgets these records.
  if (call.context) {
    head.context = call.context->id();
    call.context->sent({core_.self().rank, head.call, /*reply=*/false}, options.to.rank,
                       std::move(call.recorded));
  }
  waiting_.add(head.call, call.function, options,
               call.left.count() == 0 ? Deadline::never() : Deadline::in(call.left),
               std::move(pending),
               {connection.number, bytes_of(call.message->message), call.worker->in_flight(),
                std::move(call.slot), std::move(call.held), call.context, call.references});
  head.name = call.function.id.name;
  head.signature = call.function.id.signature;
  head.time_left = call.left.count();
  return head;
}

void OutgoingCalls::post(const Sending& call, const Peer::Numbered& connection, const Head& head) {
  const bool sent = core_.connections().faults().pass(
      call.options.kind,
      [core = core_.shared_from_this(), connection, head, message = call.message,
       references = call.references, &function = call.function, worker = call.worker] {
        connection.pass([core, over = connection.connection, head, message, references, &function,
                         worker] {
          const bool is_behind_streams = message->ready.source() != nullptr;
          const auto watched = std::move(message->message.watched);
          const Op op = send_message(*over, head, std::move(*message));
          // The caller may change the bytes, or the GPU may fail, while they are being sent.
          if (watched || (is_behind_streams && !op.ended())) {
            return op.on_ended([core, op, id = head.call, references, watched, &function, worker] {
              OutgoingCalls& calls = core->outgoing_calls();
              const auto error = op.error();
              if (!error && watched) calls.check_unchanged(id, function, *worker, *watched);
              if (!error || !is_of_message(*error)) return;
              references->undo();
              calls.waiting().fail(id, *error);
            });
          }
          if (!op.ended() || !op.error()) return;
          // A connection that has failed ends all its calls itself. Here only this message was
          // refused.
          references->undo();
          core->outgoing_calls().waiting().fail(head.call, *op.error());
        });
      });
  if (sent) {
    // If the context was released while the message was packed, that worker may not have been told.
    if (call.context && call.context->released())
      core_.extensions().contexts().tell_ended(call.options.to.rank, call.context->id());
    return;
  }
  call.references->undo();
  waiting_.fail(head.call,
                Error(Blame::PeerLost, "the connection to " + describe(call.worker->worker()) +
                                           " refused the message (an injected fault)"));
}

// With WEFT_DEBUG=detail. If an argument has changed, the callee may have a mix of its old and new
// bytes.
void OutgoingCalls::check_unchanged(std::uint64_t call, const Function& function, const Peer& to,
                                    const codec::SentBytes& sent) {
  const auto changed = sent.changed();
  if (!changed) return;
  const Error why(
      Blame::Caller,
      in_words(core_, &function, describe(to.worker())) +
          ": an argument was changed while its bytes were being sent (" + *changed +
          "), and the callee may have received a mix of old and new bytes: leave the tensors of a "
          "call alone "
          "until its future is done (of remote(): until created() is), or send clone()");
  log::error(why.text());
  waiting_.fail(call, why);
}

void OutgoingCalls::call_here(const Function& function, const CallOptions& options,
                              const std::optional<Future<void>>& first,
                              std::unique_ptr<PendingCall> pending,
                              const std::function<Task(std::uint64_t id)>& make) {
  core_.lifetime().require_open();
  auto state = std::make_shared<CallState>();
  state->caller = core_.self();
  state->generation = core_.identity().generation;
  state->context = context_of(options);
  state->no_grad = !core_.extensions().contexts().records_calls();
  state->streams = tensor::CudaDevices::current_streams(core_.devices().gpus());
  const std::uint64_t id = next_id();
  waiting_.add(id, function, options, options.deadline(), std::move(pending),
               {.in_flight = own_calls_, .context = state->context, .here = state});
  // Computed after the call's own deadline, and so not earlier: a function that returns at this
  // deadline is too late for its caller.
  state->deadline = options.deadline();
  auto task = std::make_shared<Task>(make(id));
  const auto go = [core = core_.shared_from_this(), id, state, on_loop = options.on_loop, task] {
    start_function(core, state, on_loop, std::move(*task), [core, id](const Error& why) {
      core->outgoing_calls().waiting().fail(id, why);
    });
  };
  const bool sent = core_.connections().faults().pass(
      options.kind, [core = core_.shared_from_this(), id, first, go] {
        if (!first) return go();
        first->on_done_light([core, id, go](const Future<void>& ended) {
          if (const auto error = ended.error())
            return core->outgoing_calls().waiting().complete_here(
                id, [&](PendingCall& call) { call.fail(error); });
          go();
        });
      });
  if (sent) return;
  waiting_.complete_here(id, [](PendingCall& call) {
    call.fail(std::make_exception_ptr(
        Error(Blame::PeerLost, "the call was refused (an injected fault)")));
  });
}

std::vector<std::shared_ptr<SentReferences>> OutgoingCalls::connection_ended(
    const WorkerInfo& worker, std::uint64_t connection_number, const Error& why) {
  auto expired = waiting_.expired().take_all_of(worker.rank, connection_number);
  auto failed = waiting_.fail_all_of(worker.rank, connection_number, [&](const WaitingCall& call) {
    const bool kept = why.blame() == Blame::Timeout || why.blame() == Blame::Cancelled ||
                      why.blame() == Blame::Caller || why.blame() == Blame::Busy ||
                      why.blame() == Blame::Protocol;
    const Error ended(kept ? why.blame() : Blame::PeerLost, why.text());
    return gone(core_, ended, worker.rank)
        .within(in_words(core_, call.function, describe(worker)))
        .with_ranks({worker.rank});
  });
  std::vector<std::shared_ptr<SentReferences>> given;
  for (auto& [id, call] : failed) given.push_back(std::move(call.references));
  for (auto& call : expired) given.push_back(std::move(call.references));
  return given;
}

void OutgoingCalls::knock_ended(const WorkerInfo& worker, std::uint64_t connection_number,
                                const Error& why) {
  waiting_.fail_all_of(worker.rank, connection_number, [&](const WaitingCall&) {
    return Error(why.blame(),
                 "the connection to " + describe(worker) + " has ended: " + why.text());
  });
}

}  // namespace weft::call
