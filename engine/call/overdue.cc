// SPDX-License-Identifier: Apache-2.0
// Calls that wait so long for a thread that their time may be over first. The callee tells the
// caller, so that the error there names the cause.
#include <weft/base/log.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>

namespace weft::rpc {

namespace {

// The number of calls that one agent watches at a time. Any others wait for the same reason.
constexpr int kMostWatched = 64;
constexpr auto kTelling = std::chrono::seconds(2);

}  // namespace

namespace internal {

// Called by the worker that serves that call.
void call_waits(std::uint64_t call, std::string why) {
  const CallExecutionContext& here = current_call("call_waits()");
  here.core()->note_wait(here.call().caller.rank, call, why);
}

}  // namespace internal

void AgentCore::watch_for_thread(std::shared_ptr<const CallState> state, std::uint64_t call) {
  if (!state->expires || state->deadline.is_never() || !thread_pool_->is_full()) return;
  if (watched_.fetch_add(1) >= kMostWatched) {
    --watched_;
    return;
  }
  const std::shared_ptr<void> counted(nullptr, [weak = weak_from_this()](void*) {
    if (const auto core = weak.lock()) --core->watched_;
  });
  const auto half = state->deadline.remaining() / 2;  // before the task takes the state
  after(half, Task([weak = weak_from_this(), state = std::move(state), call, counted] {
          const auto core = weak.lock();
          if (core && !state->has_begun && !state->cancelled) core->tell_of_wait(*state, call);
        }));
}

void AgentCore::tell_of_wait(const CallState& state, std::uint64_t call) {
  const std::string why = describe(parts_.self) +
                          " had no thread for it when half of that was over: all its " +
                          std::to_string(parts_.options.worker_threads) +
                          " threads run functions, and " + std::to_string(thread_pool_->waiting()) +
                          " calls wait; raise rpc::Options::worker_threads there, or have its "
                          "functions return a Future";
  const Recipient to(state.caller.rank, state.generation);
  off_loop(to, Task([self = shared_from_this(), to, call, why] {
             try {
               const CallOptions options{to, kTelling, MessageKind::Shutdown, /*on_loop=*/true};
               rpc::call<detail::FunctionBody<&internal::call_waits>>(self, options, {call, why})
                   .on_done_light([](const Future<void>&) {});
             } catch (const std::exception& error) {
               log::debug(std::string("a caller is not told that its call waits: ") + error.what());
             }
           }));
}

void AgentCore::note_wait(int callee, std::uint64_t call, const std::string& why) {
  constexpr std::size_t kMost = 400;
  calls_.note(call, callee, why.substr(0, kMost));
}

}  // namespace weft::rpc
