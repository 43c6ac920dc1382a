// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/gate.h>
#include <weft/engine/call/inbound.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/remote_incoming_call.h>
#include <weft/engine/codec/sent_bytes.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::call {

namespace {

// The time limit between a connection's acceptance and its Hello, as between a socket's and its
// greeting (transport/tcp).
constexpr std::chrono::milliseconds kGreeting = std::chrono::seconds(10);
// The pause before a failure that found the connection full is sent again.
constexpr auto kFailureAgain = std::chrono::milliseconds(20);

// The kind of message that the answer to a call counts as.
MessageKind answer_to(const Head& head) {
  return head.message == static_cast<std::uint8_t>(MessageKind::Shutdown) ? MessageKind::Shutdown
                                                                          : MessageKind::Reply;
}

std::string explain_unknown(const Identity& id) {
  std::string text;
  for (const Function* function : named(id.name)) {
    text +=
        (text.empty() ? "it knows the name with another signature: " : ", ") + function->signature;
  }
  if (!text.empty()) return text;
  return "it has no function of that name: its program neither calls it remotely nor exposes it "
         "(weft::rpc::expose<&f>(), "
         "expose<M, &M::method>(), expose<M, its constructor's arguments…>())";
}

Slot slot_for(const AgentCore& core, const Head& head,
              const std::shared_ptr<Callers::Counts>& counts) {
  const bool is_own = head.message <= static_cast<std::uint8_t>(MessageKind::Shutdown) &&
                      !is_users(static_cast<MessageKind>(head.message));
  return Slot::take({counts, is_own ? &counts->own : &counts->calls},
                    is_own ? kMostOwnInFlight : core.options().calls_in_flight);
}

std::shared_ptr<CallState> state_of(AgentCore& core, const Head& head, const WorkerInfo& caller,
                                    Generation generation) {
  auto state = std::make_shared<CallState>();
  state->caller = caller;
  state->generation = generation;
  if (head.time_left > 0) state->deadline = Deadline::in(std::chrono::nanoseconds(head.time_left));
  state->expires = head.message == static_cast<std::uint8_t>(MessageKind::Call) ||
                   head.message == static_cast<std::uint8_t>(MessageKind::Create);
  if (head.context != 0)
    state->context = core.extensions().contexts().arrived(head.context, state->caller.rank);
  state->no_grad = (head.flags & kNoGrad) != 0;
  return state;
}

void read_arguments(AgentCore& core, const std::shared_ptr<IncomingCall>& served,
                    const CallState& state, Message& message) {
  const auto read = [&](ReceivedReferences& references) {
    const c10::MultiStreamGuard streams(state.streams);
    codec::Reader reader(std::move(message.parts), &references);
    if (state.context) {
      reader.tensors().attach_gradients(state.context->receiver(
          {state.caller.rank, message.head.call, /*reply=*/false}, state.caller));
    }
    reader.read(message.body,
                [&](const msgpack::object& object) { state.function->serve(served, object); });
  };
  core.extensions().references().with_references_from(state.caller.rank, std::ref(read));
}

// With WEFT_DEBUG=detail. The reply has been sent, so the change can only be logged, here where it
// was made.
void check_unchanged(const Function& function, const WorkerInfo& caller,
                     const codec::SentBytes& sent) {
  if (const auto changed = sent.changed()) {
    log::error("the result of " + function.name + " for " + describe(caller) +
               " was changed while its bytes were being sent (" + *changed +
               "), and the caller may have received a mix of old and new bytes: return clone() of "
               "tensors that other calls or threads change");
  }
}

}  // namespace

void Inbound::start() {
  if (const auto core = core_.lock()) {
    const std::string& secret = core->options().secret;
    if (!secret.empty()) challenge_.emplace(transport::Side::Listener, secret, kChallengePurpose);
    MutexLock lock(mutex_);
    greeting_ = core->loop()->at(
        Deadline::in(kGreeting), Task([weak = weak_from_this()] {
          if (const auto self = weak.lock())
            self->turn_away("it has sent no hello for " + weft::describe(kGreeting));
        }));
  }
  connection_->receive({[weak = weak_from_this()](const transport::Arrival& arrival) {
                          if (const auto self = weak.lock()) self->arrived(arrival);
                        },
                        [weak = weak_from_this()](const Error& why) {
                          if (const auto self = weak.lock()) self->ended(why);
                        }});
}

void Inbound::turn_away(const std::string& why) {
  const auto core = core_.lock();
  if (!core || worker().rank >= 0) return;
  const Error refusal = refused(*core, why);
  connection_->turn_away(refusal);
  ended(refusal);
}

WorkerInfo Inbound::worker() const {
  MutexLock lock(mutex_);
  return worker_.value_or(WorkerInfo());
}

Generation Inbound::generation() const {
  MutexLock lock(mutex_);
  return generation_;
}

void Inbound::close(const Error& why) noexcept {
  closed_ = true;
  connection_->close(why);
}

void Inbound::arrived(const transport::Arrival& arrival) {
  const auto core = core_.lock();
  if (!core) return;
  if (challenge_ && !challenge_->is_proven()) return challenged(*core, arrival);
  if (!counts_ && !arrival.sizes.empty()) {  // allocate nothing for strangers
    connection_->accept({}, nullptr, Fence());
    return refuse(*core, "its first message is not a hello");
  }
  receive_message(
      *connection_, arrival, core->devices().receive_memory(), &core->devices().cuda(),
      [core, self = shared_from_this()](Message message, const Error* lacking) {
        self->deliver(core, std::move(message), lacking);
      },
      [&](const Error& why) {
        connection_->close(why);
        ended(why);
      });
}

// Until the peer has proved that it knows the secret, nothing but challenges is read.
void Inbound::challenged(const AgentCore& core, const transport::Arrival& arrival) {
  const auto answer =
      challenge_->answer(challenge_in(arrival).value_or(std::span<const std::byte>()));
  connection_->accept({}, nullptr, Fence());
  if (!answer) return refuse(core, answer.error().text() + " of this job (rpc::Options::secret)");
  if (!answer.value().empty()) send_challenge(*connection_, answer.value());
}

// Logs and returns why the connection ends.
Error Inbound::refused(const AgentCore& core, const std::string& wrong) const {
  Error why(Blame::Protocol, "a connection from " + connection_->peer() + " was refused: " + wrong);
  log::warn(describe(core.self()) + ": " + why.text());
  return why;
}

void Inbound::refuse(const AgentCore& core, const std::string& wrong) {
  const Error why = refused(core, wrong);
  connection_->close(why);
  ended(why);
}

void Inbound::deliver(const std::shared_ptr<AgentCore>& core, Message message,
                      const Error* lacking) {
  if (closed_) return;  // the worker's successor has come
  if (!counts_) return greeted(core, message);
  if (message.head.kind == FrameKind::Call) {
    call_arrived(core, std::move(message), lacking);
  } else if (message.head.kind == FrameKind::Cancel) {
    MutexLock lock(mutex_);
    if (const auto found = calls_.find(message.head.call); found != calls_.end())
      found->second->cancelled = true;
  }
}

// Strangers get no answer, and their second message is not read.
void Inbound::greeted(const std::shared_ptr<AgentCore>& core, const Message& message) {
  std::string wrong;
  HelloRecord hello;
  try {
    if (message.head.kind != FrameKind::Hello || !message.parts.empty()) {
      wrong = "its first message is not a hello";
    } else if (hello = decoded<HelloRecord>(message.body); hello.version != kWireVersion) {
      wrong = "it speaks version " + std::to_string(hello.version) + " and this worker version " +
              std::to_string(kWireVersion);
    } else if (hello.token != core->identity().token) {
      wrong = "it belongs to another job";
    } else if (!(hello.to == core->self()) || hello.to_generation != core->identity().generation) {
      wrong = "it wants " + describe(hello.to) + ", which is not here";
    } else if (hello.from.rank == kProbesOnly) {
      return answer_knock(message.head.call);
    } else if (hello.from.rank < 0 || hello.from.rank > kHighestRank) {
      wrong = "it names no valid rank";
    } else if (!core->members().meets(hello.from, hello.from_generation)) {
      wrong = describe(hello.from) + " has left, and another worker has its rank";
    }
  } catch (const Error& error) {
    wrong = error.text();
  }
  if (!wrong.empty()) return refuse(*core, wrong);
  counts_ = core->incoming_calls().callers().of(hello.from.rank);
  core->liveness().heard_from(hello.from.rank);
  core->connections().greeted(shared_from_this());
  MutexLock lock(mutex_);
  worker_ = hello.from;
  greeting_.reset();
  generation_ = hello.from_generation;
}

void Inbound::call_arrived(const std::shared_ptr<AgentCore>& core, Message message,
                           const Error* lacking) {
  const Head& head = message.head;
  const auto unread = [&](const Error& why) {
    fail(head.call, answer_to(head), Failure::Unread, why);
  };
  if (lacking != nullptr) return unread(*lacking);
  Slot slot = slot_for(*core, head, counts_);
  if (!slot) {
    return unread(
        Error(Blame::Busy, "it has " + std::to_string(core->options().calls_in_flight) +
                               " calls of " + describe(worker()) +
                               " to answer; wait for some before issuing more, or raise its "
                               "rpc::Options::calls_in_flight"));
  }
  // Only the loop, which runs this, changes these two members.
  const auto state = state_of(*core, head, *worker_, generation_);
  try {
    state->streams = message.streams.empty()
                         ? tensor::CudaDevices::pool_streams(core->devices().gpus())
                         : message.streams;
  } catch (const std::exception& error) {
    return unread(
        Error(Blame::Device, "there is no stream for its function: " + tensor::text_of(error)));
  }
  const Function* function = find({head.name, head.signature});
  if (function == nullptr)
    return unread(Error(Blame::Unsupported, explain_unknown({head.name, head.signature})));
  state->function = &shown_as(*function, message.body);
  if (!enter(*core, message, state)) return refuse(*core, "it uses one number for two calls");
  const auto served = std::make_shared<RemoteIncomingCall>(
      core, *state->function, (head.flags & kOnLoop) != 0, state, weak_from_this(), head.call,
      answer_to(head), std::move(slot));
  try {
    read_arguments(*core, served, *state, message);
    if ((head.flags & kOnLoop) == 0) core->incoming_calls().watch_for_thread(state, head.call);
  } catch (...) {
    unread(to_error(std::current_exception(), Blame::Caller)
               .within("its arguments cannot be decoded"));
  }
}

bool Inbound::enter(const AgentCore& core, const Message& message,
                    const std::shared_ptr<CallState>& state) {
  const trace::About shown{.name = state->function->name.c_str(),
                           .sequence = message.head.call,
                           .peer = state->caller.rank,
                           .bytes = bytes_of(message)};
  state->traced = trace::Operation::begin(core.identity().member, trace::Kind::Served, shown);
  MutexLock lock(mutex_);
  return calls_.try_emplace(message.head.call, state).second;
}

std::shared_ptr<const CallState> Inbound::longest_running() const {
  std::shared_ptr<const CallState> longest;
  MutexLock lock(mutex_);
  for (const auto& [number, state] : calls_) {
    if (!state->expires || !state->has_begun) continue;
    if (!longest || state->begun_at < longest->begun_at) longest = state;
  }
  return longest;
}

std::shared_ptr<const CallState> Inbound::call(std::uint64_t number) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(number);
  return found == calls_.end() ? nullptr : found->second;
}

void Inbound::reply(std::uint64_t call, MessageKind kind, const Function& function,
                    const CallState& state,
                    const std::function<void(codec::Packer&)>& pack) noexcept {
  const auto core = core_.lock();
  const auto context = state.no_grad ? nullptr : state.context;
  if (!core || core->closed()) return;  // the end of the connection answers all its calls
  const int caller = state.caller.rank;
  const auto references =
      core->extensions().references().references_to(Recipient(caller, state.generation));
  const auto undo = [core, context, references, message = MessageId{caller, call, /*reply=*/true}] {
    references->undo();
    if (context) context->forget(message);
  };
  try {
    codec::Writer writer(references.get());
    // This does not depend on the grad mode of the thread that brings the result.
    const bool records = context && !context->released();
    if (records) {
      writer.tensors().record_gradients();
    } else if (!state.no_grad) {
      writer.tensors().tell_computed(core->extensions().contexts().is_computed());
    }
    if (config().debug == DebugLevel::Detail) writer.tensors().watch();
    auto message = writer.write(pack);
    Outgoing outgoing = message.parts.empty()
                            ? Outgoing(std::move(message))
                            : core->devices().address(std::move(message), *map_of_results(*core),
                                                      state.caller, Way::Reply);
    // Before the reply is sent, because its gradient may be fast.
    if (records)
      context->sent({caller, call, /*reply=*/true}, caller, writer.tensors().take_recorded());
    forget(call, bytes_of(outgoing.message));
    core->incoming_calls().count_served();
    Head head;
    head.kind = FrameKind::Reply;
    head.call = call;
    head.context = records ? context->id() : 0;
    auto shared = std::make_shared<Outgoing>(std::move(outgoing));
    keep_given(call, references);
    const bool sent = core->connections().faults().pass(
        kind, [self = shared_from_this(), head, shared, undo, &function] {
          const auto watched = std::move(shared->message.watched);
          const Op op = send_message(*self->connection_, head, std::move(*shared));
          if (!op.ended() || op.error()) self->watch(op, head.call, undo);
          if (watched) {
            op.on_ended([self, op, watched, &function] {
              if (!op.error()) check_unchanged(function, self->worker(), *watched);
            });
          }
        });
    if (sent) return;
    undo();
    reply_refused(call, kind,
                  Error(Blame::PeerLost, "the connection refused the message (an injected fault)"));
  } catch (const Error& error) {
    undo();
    fail(call, kind, Failure::Refused,
         error.within("the result of " + function.name + " cannot be sent"));
  } catch (...) {
    undo();
    fail(call, kind, Failure::Refused,
         Error(Blame::Caller, "the result of " + function.name +
                                  " cannot be sent: " + text_of(std::current_exception())));
  }
}

void Inbound::keep_given(std::uint64_t call, const std::shared_ptr<SentReferences>& references) {
  if (references->is_empty()) return;
  MutexLock lock(mutex_);
  if (given_.size() >= prune_at_) {
    std::erase_if(given_, [](const auto& one) { return one.second->is_over(); });
    prune_at_ = std::max<std::size_t>(64, 2 * given_.size());
  }
  given_.insert_or_assign(call, references);
}

std::vector<std::shared_ptr<SentReferences>> Inbound::take_given() {
  std::vector<std::shared_ptr<SentReferences>> all;
  MutexLock lock(mutex_);
  for (auto& [call, references] : given_) all.push_back(std::move(references));
  given_.clear();
  return all;
}

void Inbound::take_back(std::uint64_t call) {
  std::shared_ptr<SentReferences> references;
  {
    MutexLock lock(mutex_);
    const auto found = given_.find(call);
    if (found == given_.end()) return;
    references = std::move(found->second);
    given_.erase(found);
  }
  references->undo();
}

void Inbound::fail(std::uint64_t call, MessageKind kind, Failure what,
                   const Error& error) noexcept {
  forget(call, 0, &error);
  const auto core = core_.lock();
  if (!core) return;
  core->incoming_calls().count_served();
  send_failure(*core, call, kind, what, error);
}

void Inbound::send_failure(AgentCore& core, std::uint64_t call, MessageKind kind, Failure what,
                           const Error& error) noexcept {
  // Calls that fail because this worker leaves: the end of the connection tells their callers.
  if (core.closed()) return;
  Head head;
  head.kind = FrameKind::Failure;
  head.call = call;
  const auto record = std::make_shared<const FailureRecord>(FailureRecord{
      static_cast<int>(what), static_cast<int>(error.blame()), error.text(), error.ranks()});
  const bool sent = core.connections().faults().pass(
      kind, [self = shared_from_this(), head, record] { self->send_failure_of(head, record); });
  if (sent) return;
  core.pauses().after(kFailureAgain, Task([self = shared_from_this(), call, kind, what, error] {
                        if (const auto again = self->core_.lock())
                          self->send_failure(*again, call, kind, what, error);
                      }));
}

// Without this answer the caller would wait for ever, so it is sent again while the connection is
// full.
void Inbound::send_failure_of(const Head& head,
                              const std::shared_ptr<const FailureRecord>& record) {
  const Op op = send_message(*connection_, head, encoded(*record));
  if (!op.ended() || !op.error() || !is_of_message(*op.error())) return;
  const auto core = core_.lock();
  if (core && op.error()->blame() == Blame::Busy) {
    // One call in flight has one answer. If there are more, the peer sends and does not read.
    if (unsent_.fetch_add(1) >= std::int64_t{core->options().calls_in_flight} + kMostOwnInFlight) {
      return connection_->close(
          Error(Blame::PeerLost, describe(worker()) + " sends calls and does not read the answers")
              .with_ranks({worker().rank}));
    }
    core->pauses().after(kFailureAgain, Task([self = shared_from_this(), head, record] {
                           --self->unsent_;
                           self->send_failure_of(head, record);
                         }));
  } else {
    connection_->close(op.error()->within("not even the failure of a call could be sent"));
  }
}

std::shared_ptr<const DeviceMap> Inbound::map_of_results(AgentCore& core) {
  {
    MutexLock lock(mutex_);
    if (map_) return map_;
  }
  const auto entry = core.directory().find({worker().rank, generation()});
  auto map = std::make_shared<const DeviceMap>(
      DeviceMap::to(core.self().name, entry.devices.maps).inverse());
  MutexLock lock(mutex_);
  return map_ = std::move(map);
}

// A connection that has failed ends all its calls itself. If only this message has failed, perhaps
// in a GPU, its caller is told.
void Inbound::watch(const Op& op, std::uint64_t call, const std::function<void()>& undo) {
  // Then it has surely not been sent. Otherwise the caller is asked which references have arrived.
  const bool at_once = op.ended();
  if (const auto core = core_.lock()) core->incoming_calls().count_replies(+1);
  op.on_ended([weak = weak_from_this(), weak_core = core_, op, call, undo, at_once] {
    const auto core = weak_core.lock();
    if (core) core->incoming_calls().count_replies(-1);
    const auto error = op.error();
    if (!error || (!at_once && !is_of_message(*error))) return;
    undo();
    const auto self = weak.lock();
    if (self && is_of_message(*error)) return self->reply_refused(call, MessageKind::Reply, *error);
    // The connection may have ended before the worker held anything here.
    if (self && core) core->liveness().look_after(self->worker().rank);
  });
}

void Inbound::reply_refused(std::uint64_t call, MessageKind kind, const Error& why) {
  if (const auto core = core_.lock()) {
    send_failure(*core, call, kind, Failure::Refused, why.within("the result was not sent"));
  }
}

void Inbound::forget(std::uint64_t call, std::uint64_t bytes, const Error* error) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end()) return;
  if (error != nullptr) {
    found->second->traced.fail(*error);
  } else {
    found->second->traced.add(bytes);
    found->second->traced.end();
  }
  calls_.erase(found);
}

void Inbound::ended(const Error& why) {
  {
    MutexLock lock(mutex_);
    for (auto& [id, state] : calls_) {
      state->cancelled = true;
      state->traced.fail(why);
    }
    calls_.clear();
  }
  if (const auto core = core_.lock()) core->connections().ended(*this, why);
}

// Answers a process that wants this worker's name or rank and asks whether this worker lives. It is
// told nothing else, and gets no identity: anything else that it sends is refused.
void Inbound::answer_knock(std::uint64_t call) {
  Head head;
  head.kind = FrameKind::Reply;
  head.call = call;
  send_message(*connection_, head,
               codec::Writer().write([](codec::Packer& packer) { packer.pack_nil(); }));
}

}  // namespace weft::call
