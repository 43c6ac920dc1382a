// SPDX-License-Identifier: Apache-2.0
// Reports of long waits: when a thread has waited long for the result of a call, this worker asks
// the callee how far the call is, and logs the answer on stderr. Each wait report is one line per
// worker, for the call that has been waited for longest.
#include <algorithm>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/inbound.h>

namespace weft::rpc {

namespace {

constexpr auto kSign = std::chrono::seconds(2);  // a live worker answers within this time
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

namespace internal {

// Describes the progress on this worker of a call that the asking worker made.
std::string progress_of(std::uint64_t call, bool is_fetch) {
  const CallExecutionContext& here = current_call("progress_of()");
  return here.core()->progress_of(here.call().caller.rank, call, is_fetch);
}

}  // namespace internal

// The result completes the sentence "worker1 (rank 1), which …".
std::string AgentCore::progress(const CallState& call, bool is_fetch) const {
  std::string text;
  if (is_fetch) {
    text = "has not created it yet";
  } else if (call.has_begun) {
    text =
        "has run it for " + describe_wait(since(Clock::time_point(Clock::duration(call.begun_at))));
  } else if (thread_pool_->is_full()) {
    text = "has not begun it: " +
           (parts_.options.worker_threads == 1
                ? "its only thread is busy"
                : "its " + std::to_string(parts_.options.worker_threads) + " threads are busy");
  } else {
    text = "has not begun it: the references in its arguments are not confirmed yet";
  }
  return text;
}

std::string AgentCore::progress_of(int caller, std::uint64_t call, bool is_fetch) const {
  std::vector<std::shared_ptr<Inbound>> from;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, inbound] : inbound_) from.push_back(inbound);
  }
  std::shared_ptr<const CallState> state;
  for (const auto& inbound : from) {
    if (!state && inbound->worker().rank == caller) state = inbound->call(call);
  }
  if (!state) return "";
  // Only a wait that is long enough to be worth reporting.
  const auto& reports = parts_.options.wait_reports;
  const auto own = longest_awaited(
      reports.empty() ? Milliseconds(kSign) : std::min<Milliseconds>(kSign, reports.front() / 2));
  return progress(*state, is_fetch) +
         (own ? "; it waits itself for " + own->what + " on " + name_of(own->to) : "");
}

std::string AgentCore::doing() const {
  std::vector<std::shared_ptr<Inbound>> from;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, inbound] : inbound_) from.push_back(inbound);
  }
  std::shared_ptr<const CallState> longest;
  for (const auto& inbound : from) {
    const auto one = inbound->longest_running();
    if (one && (!longest || one->begun_at < longest->begun_at)) longest = one;
  }
  std::string text;
  if (longest) text = "runs " + longest->function->name + " for " + describe(longest->caller);
  if (const auto own = longest_awaited(Milliseconds(0))) {
    text += (text.empty() ? "" : " and ") + ("waits for " + own->what) + " on " + name_of(own->to);
  }
  return text;
}

std::optional<AwaitedCall> AgentCore::longest_awaited(Milliseconds at_least) const {
  const auto waiting = loop_->waiting_since(Clock::now() - at_least);
  return waiting.empty() ? std::nullopt : calls_.longest_awaited(waiting);
}

void AgentCore::look_for_waits() {
  const auto& reports = parts_.options.wait_reports;
  if (reports.empty()) return;
  const auto pause = std::clamp<Milliseconds>(reports.front() / 4, Milliseconds(5), kLongestLook);
  looks_for_waits_ = loop_->at(Deadline::in(pause), Task([weak = weak_from_this()] {
                                 const auto core = weak.lock();
                                 if (!core || core->closed_) return;
                                 core->report_wait();
                                 core->look_for_waits();
                               }));
}

void AgentCore::report_wait() {
  const auto& reports = parts_.options.wait_reports;
  if (asks_for_report_) return;
  const auto found = longest_awaited(reports.front());
  if (!found) return;
  const auto level = Patience::reports_passed(reports, since(found->since));
  if (level <= (said_at_ >= found->since ? said_level_ : 0)) return;
  said_level_ = level;
  said_at_ = Clock::now();
  if (found->here) return say_awaited(*found, progress(*found->here, found->is_fetch));
  asks_for_report_ = true;
  off_loop(found->to,
           Task([self = shared_from_this(), found = *found] { self->ask_about(found); }));
}

void AgentCore::ask_about(const AwaitedCall& call) {
  try {
    const CallOptions options{call.to, kSign, MessageKind::Shutdown, /*on_loop=*/true};
    rpc::call<detail::FunctionBody<&internal::progress_of>>(shared_from_this(), options,
                                                            {call.id, call.is_fetch})
        .on_done_light([self = shared_from_this(), call](const Future<std::string>& answered) {
          self->asks_for_report_ = false;
          if (!answered.error()) {
            const std::string said = printable(answered.value());
            return self->say_awaited(
                call, said.empty() ? "has not received it yet, or has just answered it" : said);
          }
          const Error error = to_error(answered.error(), Blame::PeerLost);
          self->say_awaited(call,
                            error.blame() == Blame::Timeout
                                ? "does not answer: its process is stopped, or the network is cut"
                                : "cannot be asked: " + error.text());
        });
  } catch (const std::exception& error) {
    asks_for_report_ = false;
    say_awaited(call, std::string("cannot be asked: ") + error.what());
  }
}

void AgentCore::say_awaited(const AwaitedCall& call, const std::string& what_callee_does) const {
  if (closed_ || !calls_.waits(call.id)) return;  // it has been answered meanwhile
  const std::string what =
      call.is_its_own ? call.what
                      : "a future; the call that has been pending for longest is " + call.what;
  log::warn(describe(parts_.self) + " has waited " + describe_wait(since(call.since)) + " for " +
            what + " on " + (call.here ? "itself" : name_of(call.to)) + ", which " +
            what_callee_does +
            (call.limit.count() == 0
                 ? "; the call has no time limit: rpc::to(worker).timeout(…) gives it one"
                 : ""));
}

}  // namespace weft::rpc
