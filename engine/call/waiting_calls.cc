// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/make_error.h>
#include <weft/engine/call/body.h>
#include <weft/engine/call/call_errors.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/waiting_calls.h>
#include <weft/profiling/trace/dump.h>

namespace weft::call {

namespace {

// Whether a graceful shutdown waits for such calls.
bool counts(MessageKind kind) { return kind != MessageKind::Shutdown; }

}  // namespace

void WaitingCalls::add(std::uint64_t id, const Function& function, const CallOptions& options,
                       Deadline deadline, std::unique_ptr<PendingCall> pending, Leaving leaving) {
  if (counts(options.kind)) {
    ++waiting_;
    ++issued_;
  }
  const trace::About shown{.name = function.name.c_str(),
                           .sequence = id,
                           .peer = options.to.rank,
                           .bytes = leaving.bytes};
  table_.add(id,
             {coarse_now(), std::move(pending), deadline, options.limit, &function, options.to.rank,
              leaving.connection_number, options.kind, std::move(leaving.context),
              std::move(leaving.references), std::move(leaving.here),
              trace::Operation::begin(core_.identity().member, trace::Kind::Call, shown),
              trace::Waiting(leaving.in_flight),
              /*note=*/{}, std::move(leaving.slot), std::move(leaving.held)});
  arm(deadline);
  // The agent may have left meanwhile, and have failed the calls that waited before this one did.
  if (core_.closed()) {
    fail_all([this](const WaitingCall& call) {
      return left(core_, call, core_.connections().name_of(call.to));
    });
  }
}

// Continuations that may issue calls are handed to the thread pool before the call stops counting,
// so that an idle agent is really idle.
WaitingCall WaitingCalls::complete(WaitingCall call, const std::function<void(PendingCall&)>& how) {
  if (!call.pending) return call;
  call.slot = {};  // before continuations, which may need it
  try {
    how(*call.pending);
  } catch (...) {  // moving the result threw
    const auto error = std::current_exception();
    call.traced.fail(to_error(error, Blame::Remote));
    call.pending->fail(detail::thrown_by(core_, *call.function, error));
  }
  call.traced.end();
  if (counts(call.kind)) --waiting_;
  call.context = nullptr;
  call.in_flight = {};
  return call;
}

void WaitingCalls::fail(std::uint64_t id, const Error& why) {
  WaitingCall call = table_.take(id);
  const Error error =
      (call.connection_number == 0 ? why : gone(core_, why, call.to))
          .within(in_words(core_, call.function, core_.connections().name_of(call.to)));
  call.traced.fail(error);
  forget_recorded(id, call);
  call.bytes = {};  // they have not been sent
  complete(std::move(call),
           [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(error)); });
}

void WaitingCalls::complete_here(std::uint64_t id, const std::function<void(PendingCall&)>& how) {
  WaitingCall call = table_.take(id);
  if (!call.pending || !call.deadline.passed()) {
    complete(std::move(call), how);
    return;
  }
  const Error late = not_in_time(core_, call, core_.connections().name_of(call.to));
  call.traced.fail(late);
  complete(std::move(call),
           [&](PendingCall& pending) { pending.fail(std::make_exception_ptr(late)); });
}

void WaitingCalls::forget_recorded(std::uint64_t id, const WaitingCall& call) const {
  if (call.context) call.context->forget({core_.self().rank, id, /*reply=*/false});
}

std::vector<PendingCalls::Taken> WaitingCalls::fail(std::vector<PendingCalls::Taken> calls,
                                                    const Why& why) {
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

std::vector<PendingCalls::Taken> WaitingCalls::fail_all_of(int rank,
                                                           std::uint64_t connection_number,
                                                           const Why& why) {
  return fail(table_.take_all_to(rank, connection_number), why);
}

// All calls share one timer. It fires at the earliest deadline and looks for calls whose time is
// over.
void WaitingCalls::arm(Deadline deadline) {
  if (deadline.point() >= armed_.load()) return;
  MutexLock lock(mutex_);
  if (deadline.point() >= armed_.load() || core_.closed()) return;
  armed_ = deadline.point();
  timer_ = core_.loop()->at(deadline, Task([weak = core_.weak_from_this()] {
                              if (const auto core = weak.lock())
                                core->outgoing_calls().waiting().expire();
                            }));
}

void WaitingCalls::expire() {
  armed_ = Deadline::Clock::time_point::max();
  Deadline next = Deadline::never();
  auto over = table_.take_expired(Deadline::Clock::now(), next);
  arm(next);
  for (const auto& [id, call] : over) {
    const auto standing = core_.connections().standing(call.to, call.connection_number);
    if (!standing.connection) continue;  // the connection has ended, and the call with it
    Head head;
    head.kind = FrameKind::Cancel;
    head.call = id;
    standing.pass(
        [connection = standing.connection, head] { send_message(*connection, head, {}); });
  }
  expired_.add(fail(std::move(over), [&](const WaitingCall& call) {
    return not_in_time(core_, call, core_.connections().name_of(call.to));
  }));
}

EventLoop::Registration WaitingCalls::take_timer() {
  MutexLock lock(mutex_);
  return std::move(timer_);
}

void WaitingCalls::note(std::uint64_t call, int callee, const std::string& why) {
  constexpr std::size_t kMost = 400;
  table_.note(call, callee, why.substr(0, kMost));
}

}  // namespace weft::call
