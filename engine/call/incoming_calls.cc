// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/log.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/incoming_calls.h>

namespace weft::rpc::internal {

// Called by the worker that serves that call.
void call_waits(std::uint64_t call, std::string why) {
  const call::CallExecutionContext& here = call::current_call("call_waits()");
  here.core()->outgoing_calls().waiting().note(call, here.call().caller.rank, why);
}

}  // namespace weft::rpc::internal

namespace weft::call {

namespace {

// The number of calls that one agent watches at a time. Any others wait for the same reason.
constexpr int kMostWatched = 64;
constexpr auto kTelling = std::chrono::seconds(2);
// The length of a wait of this worker itself that it mentions, unless it reports shorter ones.
constexpr auto kAwaited = std::chrono::seconds(2);

using Milliseconds = std::chrono::milliseconds;
using Clock = Deadline::Clock;

Milliseconds since(Clock::time_point then) {
  return std::chrono::duration_cast<Milliseconds>(Clock::now() - then);
}

}  // namespace

void IncomingCalls::watch_for_thread(std::shared_ptr<const CallState> state, std::uint64_t call) {
  if (!state->expires || state->deadline.is_never() || !core_.thread_pool()->is_full()) return;
  if (watched_.fetch_add(1) >= kMostWatched) {
    --watched_;
    return;
  }
  const std::shared_ptr<void> counted(nullptr, [weak = core_.weak_from_this()](void*) {
    if (const auto core = weak.lock()) --core->incoming_calls().watched_;
  });
  const auto half = state->deadline.remaining() / 2;  // before the task takes the state
  core_.pauses().after(
      half, Task([weak = core_.weak_from_this(), state = std::move(state), call, counted] {
        const auto core = weak.lock();
        if (core && !state->has_begun && !state->cancelled)
          core->incoming_calls().tell_of_wait(*state, call);
      }));
}

void IncomingCalls::tell_of_wait(const CallState& state, std::uint64_t call) {
  const std::string why =
      describe(core_.self()) + " had no thread for it when half of that was over: all its " +
      std::to_string(core_.options().worker_threads) + " threads run functions, and " +
      std::to_string(core_.thread_pool()->waiting()) +
      " calls wait; raise rpc::Options::worker_threads there, or have its "
      "functions return a Future";
  const Recipient to(state.caller.rank, state.generation);
  core_.connections().off_loop(
      to, Task([self = core_.shared_from_this(), to, call, why] {
        try {
          const CallOptions options{to, kTelling, MessageKind::Shutdown, /*on_loop=*/true};
          issue<detail::FunctionBody<&rpc::internal::call_waits>>(self, options, {call, why})
              .on_done_light([](const Future<void>&) {});
        } catch (const std::exception& error) {
          log::debug(std::string("a caller is not told that its call waits: ") + error.what());
        }
      }));
}

// The result completes the sentence "worker1 (rank 1), which …".
std::string IncomingCalls::progress(const CallState& call, bool is_fetch) const {
  std::string text;
  if (is_fetch) {
    text = "has not created it yet";
  } else if (call.has_begun) {
    text =
        "has run it for " + describe_wait(since(Clock::time_point(Clock::duration(call.begun_at))));
  } else if (core_.thread_pool()->is_full()) {
    text = "has not begun it: " +
           (core_.options().worker_threads == 1
                ? "its only thread is busy"
                : "its " + std::to_string(core_.options().worker_threads) + " threads are busy");
  } else {
    text = "has not begun it: the references in its arguments are not confirmed yet";
  }
  return text;
}

std::string IncomingCalls::progress_of(int caller, std::uint64_t call, bool is_fetch) const {
  std::shared_ptr<const CallState> state;
  for (const auto& inbound : core_.connections().inbound()) {
    if (!state && inbound->worker().rank == caller) state = inbound->call(call);
  }
  if (!state) return "";
  // Only a wait that is long enough to be worth reporting.
  const auto& reports = core_.options().wait_reports;
  const auto own = core_.outgoing_calls().awaited().longest(
      reports.empty() ? Milliseconds(kAwaited)
                      : std::min<Milliseconds>(kAwaited, reports.front() / 2));
  return progress(*state, is_fetch) +
         (own ? "; it waits itself for " + own->what + " on " + core_.connections().name_of(own->to)
              : "");
}

std::string IncomingCalls::doing() const {
  std::shared_ptr<const CallState> longest;
  for (const auto& inbound : core_.connections().inbound()) {
    const auto one = inbound->longest_running();
    if (one && (!longest || one->begun_at < longest->begun_at)) longest = one;
  }
  std::string text;
  if (longest) text = "runs " + longest->function->name + " for " + describe(longest->caller);
  if (const auto own = core_.outgoing_calls().awaited().longest(Milliseconds(0))) {
    text += (text.empty() ? "" : " and ") + ("waits for " + own->what) + " on " +
            core_.connections().name_of(own->to);
  }
  return text;
}

void IncomingCalls::take_back_reply(int caller, std::uint64_t call) {
  core_.extensions().contexts().forget({caller, call, /*reply=*/true});
  for (const auto& inbound : core_.connections().inbound()) {
    if (inbound->worker().rank == caller) inbound->take_back(call);
  }
}

}  // namespace weft::call
