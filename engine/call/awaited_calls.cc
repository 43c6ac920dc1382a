// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/awaited_calls.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/liveness.h>

namespace weft::rpc::internal {

// Describes the progress on this worker of a call that the asking worker made.
std::string progress_of(std::uint64_t call, bool is_fetch) {
  const call::CallExecutionContext& here = call::current_call("progress_of()");
  return here.core()->incoming_calls().progress_of(here.call().caller.rank, call, is_fetch);
}

}  // namespace weft::rpc::internal

namespace weft::call {

namespace {

constexpr auto kLongestLook = std::chrono::seconds(1);
constexpr std::size_t kMostText = 400;  // bytes of a callee's answer that are logged

using Milliseconds = std::chrono::milliseconds;
using Clock = Deadline::Clock;

Milliseconds since(Clock::time_point then) {
  return std::chrono::duration_cast<Milliseconds>(Clock::now() - then);
}

std::string printable(std::string text) {
  text.resize(std::min(text.size(), kMostText));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7F; }, '?');
  return text;
}

}  // namespace

std::optional<AwaitedCall> AwaitedCalls::longest(Milliseconds at_least) const {
  const auto waiting = core_.loop()->waiting_since(Clock::now() - at_least);
  return waiting.empty() ? std::nullopt : core_.outgoing_calls().waiting().longest_awaited(waiting);
}

void AwaitedCalls::look() {
  const auto& reports = core_.options().wait_reports;
  if (reports.empty()) return;
  const auto pause = std::clamp<Milliseconds>(reports.front() / 4, Milliseconds(5), kLongestLook);
  looks_ = core_.loop()->at(Deadline::in(pause), Task([weak = core_.weak_from_this()] {
                              const auto core = weak.lock();
                              if (!core || core->closed()) return;
                              core->outgoing_calls().awaited().report();
                              core->outgoing_calls().awaited().look();
                            }));
}

void AwaitedCalls::report() {
  const auto& reports = core_.options().wait_reports;
  if (asks_) return;
  const auto found = longest(reports.front());
  if (!found) return;
  const auto level = Patience::reports_passed(reports, since(found->since));
  if (level <= (said_at_ >= found->since ? said_level_ : 0)) return;
  said_level_ = level;
  said_at_ = Clock::now();
  if (found->here)
    return say(*found, core_.incoming_calls().progress(*found->here, found->is_fetch));
  asks_ = true;
  core_.connections().off_loop(found->to, Task([self = core_.shared_from_this(), found = *found] {
                                 self->outgoing_calls().awaited().ask_about(found);
                               }));
}

void AwaitedCalls::ask_about(const AwaitedCall& call) {
  try {
    const CallOptions options{call.to, kProbeLimit, MessageKind::Shutdown, /*on_loop=*/true};
    issue<detail::FunctionBody<&rpc::internal::progress_of>>(core_.shared_from_this(), options,
                                                             {call.id, call.is_fetch})
        .on_done_light(
            [self = core_.shared_from_this(), call](const Future<std::string>& answered) {
              self->outgoing_calls().awaited().asks_ = false;
              if (!answered.error()) {
                const std::string said = printable(answered.value());
                return self->outgoing_calls().awaited().say(
                    call, said.empty() ? "has not received it yet, or has just answered it" : said);
              }
              const Error error = to_error(answered.error(), Blame::PeerLost);
              self->outgoing_calls().awaited().say(
                  call, error.blame() == Blame::Timeout
                            ? "does not answer: its process is stopped, or the network is cut"
                            : "cannot be asked: " + error.text());
            });
  } catch (const std::exception& error) {
    asks_ = false;
    say(call, std::string("cannot be asked: ") + error.what());
  }
}

void AwaitedCalls::say(const AwaitedCall& call, const std::string& what_callee_does) const {
  if (core_.closed() || !core_.outgoing_calls().waiting().waits(call.id))
    return;  // it has been answered meanwhile
  const std::string what =
      call.is_its_own ? call.what
                      : "a future; the call that has been pending for longest is " + call.what;
  log::warn(describe(core_.self()) + " has waited " + describe_wait(since(call.since)) + " for " +
            what + " on " + (call.here ? "itself" : core_.connections().name_of(call.to)) +
            ", which " + what_callee_does +
            (call.limit.count() == 0
                 ? "; the call has no time limit: rpc::to(worker).timeout(…) gives it one"
                 : ""));
}

}  // namespace weft::call
