// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <c10/core/StreamGuard.h>

#include <weft/base/make_error.h>
#include <weft/engine/call/call_errors.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/replies.h>
#include <weft/engine/call/wire_records.h>

namespace weft::call {

namespace {

std::vector<c10::Storage> on_gpus(const std::vector<codec::Part>& parts) {
  std::vector<c10::Storage> storages;
  for (const codec::Part& part : parts) {
    if (part.device().is_cuda()) storages.push_back(part.storage);
  }
  return storages;
}

// Reads a reply that nobody waits for, so that the references in it end as all do: here, and with
// their owners. A reply that cannot be read, or that was recorded in a context, ends where it was
// sent.
void read_late(AgentCore& core, const WaitingCall& call, const WorkerInfo& worker, Message message,
               const Error* lacking) {
  const auto give_back = [&] {
    core.extensions().references().give_back_reply(worker.rank, message.head.call);
  };
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
    core.extensions().references().with_references_from(worker.rank, std::ref(read));
  } catch (...) {
    return give_back();
  }
  if (message.head.context != 0) give_back();
}

// A reply that has come in time, and the parts of its call that it needs.
struct Delivery {
  AgentCore& core;
  const WorkerInfo& worker;
  Message& message;
  const Function& function;
  const std::shared_ptr<CallContext> context;
  const std::shared_ptr<SentReferences> given;
  trace::Operation traced;

  bool is_failure() const { return message.head.kind == FrameKind::Failure; }
  void read(PendingCall& pending, ReceivedReferences& references);
  [[noreturn]] void throw_failure(const FailureRecord& record) const;
  void fail(PendingCall& pending, const Error* lacking);
};

void Delivery::read(PendingCall& pending, ReceivedReferences& references) {
  const c10::MultiStreamGuard streams(message.streams);
  const auto enqueued = [&, storages = on_gpus(message.parts)] {
    return core.devices().cuda().work(message.streams, storages);
  };
  codec::Reader reader(std::move(message.parts), &references);
  if (context && !context->released()) {
    reader.tensors().attach_gradients(
        context->receiver({core.self().rank, message.head.call, /*reply=*/true}, worker));
  }
  reader.tensors().on_computed([&](const at::Tensor& result) {
    core.extensions().contexts().note_computed(result, describe(worker), function.name);
  });
  reader.read(message.body, [&](const msgpack::object& object) {
    if (is_failure()) throw_failure(object.as<FailureRecord>());
    pending.succeed(object, std::ref(enqueued));  // which allocates nothing
    traced.end();
  });
}

void Delivery::throw_failure(const FailureRecord& record) const {
  const Blame blame = blame_from(record.blame);
  if (record.what == static_cast<int>(Failure::Unread) && given) given->undo();
  if (record.what == static_cast<int>(Failure::Thrown)) {
    throw RemoteError(worker.name, function.name, record.text, record.ranks);
  }
  if (record.what == static_cast<int>(Failure::NotCreated)) {
    throw CreationError(Error(blame, record.text).with_ranks(record.ranks));
  }
  throw Error(blame, "calling " + function.name + " [" + function.signature + "] on " +
                         describe(worker) + ": " + record.text)
      .with_ranks(record.ranks);
}

// Fails the call with the exception that is being handled.
void Delivery::fail(PendingCall& pending, const Error* lacking) {
  auto error = std::current_exception();
  if (!is_failure() && lacking == nullptr) {
    const Error why = to_error(error, Blame::Caller);
    error = std::make_exception_ptr(
        why.within(in_words(core, &function, describe(worker)) + ": its result cannot be decoded"));
  }
  traced.fail(to_error(error, Blame::Remote));
  // Before it is known to have failed.
  if (context) context->forget({core.self().rank, message.head.call, /*reply=*/false});
  if (!is_failure()) core.extensions().references().give_back_reply(worker.rank, message.head.call);
  pending.fail(error);
}

void deliver(AgentCore& core, WaitingCall call, const WorkerInfo& worker, Message message,
             const Error* lacking) {
  Delivery delivery{core,
                    worker,
                    message,
                    *call.function,
                    call.context,
                    call.references,
                    std::exchange(call.traced, {})};
  delivery.traced.add(bytes_of(message));
  core.outgoing_calls().waiting().complete(std::move(call), [&](PendingCall& pending) {
    try {
      if (lacking != nullptr) throw *lacking;
      const auto read = [&](ReceivedReferences& references) { delivery.read(pending, references); };
      core.extensions().references().with_references_from(worker.rank, std::ref(read));
    } catch (...) {
      delivery.fail(pending, lacking);
    }
  });
}

}  // namespace

void reply_arrived(AgentCore& core, const WorkerInfo& worker, std::uint64_t connection_number,
                   Message message, const Error* lacking) {
  WaitingCalls& waiting = core.outgoing_calls().waiting();
  const std::uint64_t id = message.head.call;
  WaitingCall call = waiting.take_of(id, worker.rank, connection_number);
  if (!call.pending) {  // its time was over, or the peer made it up
    const auto expired = waiting.expired().take(id, worker.rank, connection_number);
    if (expired.call.pending)
      return read_late(core, expired.call, worker, std::move(message), lacking);
    // The references in it would never end otherwise.
    if (expired.was_dropped && message.head.kind != FrameKind::Failure)
      core.extensions().references().give_back_reply(worker.rank, id);
    return;
  }
  call.bytes = {};
  if (!call.deadline.passed())
    return deliver(core, std::move(call), worker, std::move(message), lacking);
  // It is late even if it was faster than the timer.
  const Error late = not_in_time(core, call, describe(worker));
  call.traced.fail(late);
  waiting.forget_recorded(id, call);
  call = waiting.complete(
      std::move(call), [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(late)); });
  read_late(core, call, worker, std::move(message), lacking);
}

}  // namespace weft::call
