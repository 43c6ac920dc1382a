// SPDX-License-Identifier: Apache-2.0
// Graceful shutdown. The lowest rank decides: the others call it and wait for its reply. Once all
// have called, it asks every worker for its activity, again and again, until two successive rounds
// find all idle and no call issued in between. A call on its way counts as waiting at its caller,
// so then there is none.
#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>

#include <weft/base/log.h>
#include <weft/base/patience.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/store/backoff.h>

namespace weft::rpc {

namespace internal {

Activity activity() { return current_call("activity()").core()->activity(); }

Future<Outcome> join_shutdown() {
  const CallExecutionContext& here = current_call("join_shutdown()");
  return here.core()->join_shutdown(here.call().caller.rank, here.call().deadline);
}

// Asked by a higher rank that would report the wait for rank 0. Only the lowest rank that waits
// reports it.
bool awaits_verdict() { return current_call("awaits_verdict()").core()->awaits_verdict(); }

// Asked of a worker that has not called shutdown() yet.
std::string doing() { return current_call("doing()").core()->doing(); }

}  // namespace internal

namespace {

constexpr const char* kAllCall =
    "; all workers must call shutdown(), and one that must not wait calls leave()";
constexpr auto kVerdict = std::chrono::seconds(10);  // for the others to hear the verdict
// By how much, at most, a worker's limit is over earlier there than here, where it is counted from
// the arrival of its message.
constexpr auto kOnTheWay = std::chrono::seconds(1);

constexpr auto kSignOfLife = std::chrono::seconds(2);  // a live worker answers within this time

// Waits until the deadline at most. Returns whether the future is done by then, with a value or an
// error.
template <class T>
bool ends_by(const Future<T>& future, Deadline deadline) {
  if (future.done()) return true;
  try {
    future.wait(deadline.is_never() ? kNoTimeout
                                    : std::max(deadline.remaining(), std::chrono::milliseconds(1)));
  } catch (...) {
    return future.done();  // false: the time was over
  }
  return true;
}

// Describes the state of a worker that has not called shutdown(): ": it runs f for worker1 (rank
// 1)".
std::string but(const std::string& doing, const std::string& worker = "it") {
  return doing.empty() ? "" : ": " + worker + " " + doing;
}

std::string in_numbers(std::uint64_t number, const std::string& of_one,
                       const std::string& of_more) {
  return std::to_string(number) + " " + (number == 1 ? of_one : of_more);
}

std::string without_names(std::string text) {
  for (const std::string& name : {detail::FunctionBody<&internal::activity>::name(),
                                  detail::FunctionBody<&internal::join_shutdown>::name()}) {
    for (auto at = text.find(name); at != std::string::npos; at = text.find(name))
      text.replace(at, name.size(), "shutdown()");
  }
  return text;
}

// The error of one of shutdown's own questions, without the names of these functions.
Error unanswered(const Error& error, const WorkerInfo& worker, const std::string& what) {
  switch (error.blame()) {
    case Blame::Timeout:
      return Error(Blame::Timeout, describe(worker) + " has not said in time " + what)
          .with_ranks({worker.rank});
    case Blame::PeerLost:
      return Error(Blame::PeerLost, describe(worker) + " is lost, or has left without shutdown()")
          .with_ranks({worker.rank});
    default: return error.with_text(without_names(error.text()));
  }
}

}  // namespace

Activity AgentCore::activity() const {
  // Counts waiting calls first: anything that a call causes runs before the call stops waiting.
  Activity now;
  now.waiting = waiting_;
  now.running = thread_pool_->active();
  now.issued = issued_;
  return now;
}

Future<Outcome> AgentCore::join_shutdown(int rank, Deadline limit) {
  Promise<Outcome> promise;
  ShuttingDown joins{promise, limit};
  {
    std::lock_guard lock(mutex_);
    const auto [known, is_new] = shutting_down_.try_emplace(rank, joins);
    if (!is_new) std::swap(known->second, joins);  // its earlier question fails outside the lock
  }
  thread_pool_->recall();  // wakes rank 0's thread, whose condition is called under the loop's lock
  if (!awaited_here_) {
    awaited_here_.emplace(parts_.options.wait_reports);
    report_awaited();
  }
  return promise.future();
}

void AgentCore::report_awaited() {
  std::vector<int> ranks;
  {
    std::lock_guard lock(mutex_);
    if (shutdown_began_ || closed_ || shutting_down_.empty()) return awaited_here_.reset();
    for (const auto& [rank, joins] : shutting_down_) ranks.push_back(rank);
  }
  if (awaited_here_->is_over()) {
    log::warn("shutdown() has been waiting for " + describe_wait(awaited_here_->waited()) + " on " +
              names_of(ranks) + " for " + describe(parts_.self) + ", which has not called it" +
              but(doing()) + kAllCall);
  }
  if (awaited_here_->next().is_never()) return;
  reports_awaited_ = loop_->at(awaited_here_->next(), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->report_awaited();
  });
}

std::string AgentCore::names_of(const std::vector<int>& ranks) const {
  std::string names;
  for (const int rank : ranks) names += (names.empty() ? "" : ", ") + name_of(rank);
  return names;
}

std::vector<int> AgentCore::missing_from_shutdown() const {
  std::lock_guard lock(mutex_);
  std::vector<int> missing;
  for (int rank = 1; rank < *parts_.world_size; ++rank) {
    if (!shutting_down_.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

void AgentCore::shutdown(const Graceful& options) {
  const auto limit = usable_limit(options.timeout, "rpc::Graceful::timeout");
  const std::string what = "the graceful shutdown of " + describe(parts_.self);
  // A function that runs there would wait for its own end.
  if (!closed_ && (weft::detail::thread_executor() == thread_pool_.get() || loop_->inside())) {
    throw Error(
        Blame::Caller,
        what +
            " waits for all functions and continuations, and was asked for by one that this agent "
            "runs: call shutdown() on a thread of the program's own, or leave()");
  }
  {
    std::unique_lock lock(mutex_);
    if (shutdown_began_) {
      lock.unlock();
      return wait_for_shutdown(limit, what);
    }
    if (closed_) return;
    shutdown_began_ = true;
  }
  try {
    shut_down(limit, what);
  } catch (...) {
    shutdown_ended_.set_error(std::current_exception());
    throw;
  }
  shutdown_ended_.set();
}

// Waits for the shutdown that another thread has begun; but not in a function, or a continuation,
// for whose end that shutdown waits.
void AgentCore::wait_for_shutdown(std::chrono::milliseconds limit, const std::string& what) const {
  const auto ended = shutdown_ended_.future();
  if (ended.done() || weft::detail::thread_executor() == thread_pool_.get()) return;
  try {
    ended.wait(limit.count() == 0 ? kNoTimeout : limit);
  } catch (const Error&) {
    if (ended.done()) throw;
    throw Error(Blame::Timeout, what + ", which another thread has begun, is not over after " +
                                    weft::describe(limit));
  }
}

void AgentCore::shut_down(std::chrono::milliseconds limit, const std::string& what) {
  const Deadline deadline = limit.count() == 0 ? Deadline::never() : Deadline::in(limit);
  try {
    if (!parts_.world_size) {
      wait_for_own_calls(deadline);
    } else if (parts_.self.rank != 0) {
      const int first = 0;
      // This thread sleeps meanwhile. If it drove the loop, the calls that still arrive would have
      // to be handed to other threads.
      Promise<Outcome> ended(nullptr);
      call<detail::FunctionBody<&internal::join_shutdown>>(
          shared_from_this(), {first, limit, MessageKind::Shutdown, /*on_loop=*/true}, {})
          .forward_to(ended);
      Outcome verdict;
      try {
        verdict = await_verdict(ended.future());
      } catch (const Error& error) {
        throw unanswered(error, directory_.find(first).worker,
                         "that all workers are idle: one has not called shutdown(), or calls and "
                         "functions go on");
      }
      if (verdict.failed()) throw verdict.error();
    } else {
      wait_until_idle_everywhere(deadline);
    }
  } catch (const Error& error) {
    const Error why = error.within(what);
    tell_verdict(Outcome(why), Deadline::in(kVerdict));
    leave();
    throw why;
  }
  report_held();
  leave();
}

// Rank 0 itself reports which workers it waits for, unless it is stopped or cannot be reached.
Outcome AgentCore::await_verdict(const Future<Outcome>& verdict) {
  constexpr int kFirst = 0;
  awaits_verdict_ = true;
  Patience patience(parts_.options.wait_reports);
  while (!ends_by(verdict, patience.next())) {
    if (!patience.is_over() || answers<detail::FunctionBody<&internal::alive>>({kFirst}) || closed_)
      continue;
    std::vector<int> lower;
    for (int rank = 1; rank < parts_.self.rank; ++rank) lower.push_back(rank);
    if (answers<detail::FunctionBody<&internal::awaits_verdict>>(lower) || verdict.done()) continue;
    log::warn(describe(parts_.self) + " has waited " + describe_wait(patience.waited()) +
              " in shutdown(): " + name_of(kFirst) +
              ", which decides when all workers are idle, does not answer; its process is stopped "
              "(SIGCONT "
              "lets it go on), or its host cannot be reached; leave() waits for nobody");
  }
  return verdict.get();
}

// Whether one of these workers answers within kSignOfLife; if Body returns a bool, with true. Other
// errors than Timeout are answers too, unless Body returns a bool: if the worker is gone, the calls
// that wait for it fail by themselves.
template <class Body>
bool AgentCore::answers(const std::vector<int>& ranks) {
  using Answer = typename Body::Result;
  std::vector<Future<Answer>> asked;
  const Deadline limit = Deadline::in(kSignOfLife);
  for (const int rank : ranks) {
    try {
      asked.push_back(call<Body>(shared_from_this(),
                                 {rank, kSignOfLife, MessageKind::Shutdown, /*on_loop=*/true}, {}));
    } catch (const Error&) {  // it cannot be reached at present
    }
  }
  return std::any_of(asked.begin(), asked.end(), [&](const Future<Answer>& one) {
    if (!ends_by(one, limit)) return false;
    try {
      if constexpr (std::is_same_v<Answer, bool>) return one.get();
      one.get();
    } catch (const Error& error) {
      return !std::is_same_v<Answer, bool> && error.blame() != Blame::Timeout;
    }
    return true;
  });
}

// Logs, once, the references that the program still holds when all has ended: after its agent, a
// reference is of no use.
void AgentCore::report_held() const {
  constexpr std::size_t kMost = 20;
  const auto held = references_->held();
  if (held.empty()) return;
  std::string text = describe(parts_.self) + " shuts down while its program still holds " +
                     in_numbers(held.size(), "reference", "references") + " to " +
                     (held.size() == 1 ? "a value" : "values") + " of other workers; drop " +
                     (held.size() == 1 ? "it" : "them") + " before shutdown():";
  for (std::size_t i = 0; i < std::min(held.size(), kMost); ++i) text += "\n  " + held[i];
  if (held.size() > kMost) text += "\n  and " + std::to_string(held.size() - kMost) + " more";
  log::warn(text);
}

void AgentCore::wait_for_own_calls(Deadline deadline) {
  group::Backoff pause;
  for (;;) {
    const Activity now = activity();
    if (now.waiting == 0 && now.running == 0) return;
    if (deadline.passed())
      throw Error(Blame::Timeout,
                  in_numbers(now.waiting, "call waits for its reply", "calls wait for replies") +
                      " and " + in_numbers(now.running, "function runs", "functions run"));
    pause.wait(deadline);
  }
}

Error AgentCore::why_gone(int rank) const {
  const std::string worker = name_of(rank);
  std::lock_guard lock(mutex_);
  const auto found = shutting_down_.find(rank);
  if (found != shutting_down_.end() && found->second.limit.remaining() < kOnTheWay) {
    return Error(Blame::Timeout,
                 worker +
                     " has left: the limit of its shutdown() was over before all workers were idle")
        .with_ranks({rank});
  }
  return Error(Blame::PeerLost, worker + " is lost, or has left without shutdown()")
      .with_ranks({rank});
}

std::string AgentCore::doing_of(int rank) {
  try {
    const auto answer = call<detail::FunctionBody<&internal::doing>>(
        shared_from_this(), {rank, kSignOfLife, MessageKind::Shutdown, /*on_loop=*/true}, {});
    std::string text = answer.get();
    constexpr std::size_t kMost = 400;
    text.resize(std::min(text.size(), kMost));
    return text;
  } catch (const Error& error) {
    return error.blame() == Blame::Timeout
               ? "does not answer: its process is stopped, or the network is cut"
               : "";
  }
}

void AgentCore::wait_until_idle_everywhere(Deadline deadline) {
  const std::size_t others = static_cast<std::size_t>(*parts_.world_size) - 1;
  const auto all_have_come = [&] {
    std::lock_guard lock(mutex_);
    return closed_ || shutting_down_.size() == others || !lost_.empty();
  };
  for (int rank = 1; rank <= static_cast<int>(others); ++rank) {
    look_after(rank, Asked::ByTheWay);  // a worker that is gone will not call shutdown()
  }
  Patience patience(parts_.options.wait_reports);
  const auto tell = [&](const std::string& why) {
    log::warn(describe(parts_.self) + " has waited " + describe_wait(patience.waited()) +
              " in shutdown(): " + why);
  };
  const auto say = [&](const std::string& why) {
    if (patience.is_over()) tell(why);
  };
  while (!thread_pool_->drive(all_have_come, Deadline::sooner(deadline, patience.next())) &&
         !deadline.passed()) {
    if (!patience.is_over()) continue;
    const auto missing = missing_from_shutdown();
    if (missing.empty()) continue;
    tell("shutdown() has not been called by " + names_of(missing) +
         but(doing_of(missing.front()), name_of(missing.front())) + kAllCall);
  }
  if (closed_) throw Error(Blame::Cancelled, "leave() was called meanwhile");
  std::optional<int> lost;
  {
    std::lock_guard lock(mutex_);
    if (!lost_.empty()) lost = *lost_.begin();
  }
  std::optional<Error> gone;
  if (lost) gone = why_gone(*lost);
  if (gone && gone->blame() == Blame::PeerLost) throw Error(*gone);
  if (const auto missing = missing_from_shutdown(); !missing.empty()) {
    throw Error(Blame::Timeout, "shutdown() has not been called in time by " + names_of(missing))
        .with_ranks(missing);
  }
  if (gone) throw Error(*gone);
  std::vector<Activity> before;
  std::string busy;  // the busy workers of the last complete round
  group::Backoff pause;
  for (;;) {
    std::vector<Activity> now{activity()};
    std::vector<Future<Activity>> asked;
    for (int rank = 1; rank <= static_cast<int>(others); ++rank) {
      const auto limit = deadline.is_never()
                             ? std::chrono::milliseconds(0)
                             : std::max(deadline.remaining(), std::chrono::milliseconds(1));
      asked.push_back(call<detail::FunctionBody<&internal::activity>>(
          shared_from_this(), {rank, limit, MessageKind::Shutdown, /*on_loop=*/true}, {}));
    }
    for (std::size_t i = 0; i < asked.size(); ++i) {
      while (!ends_by(asked[i], patience.next())) {
        say(name_of(static_cast<int>(i) + 1) +
            " does not answer; its process is stopped (SIGCONT lets it go on), or its host cannot "
            "be reached; leave() "
            "waits "
            "for nobody");
      }
      try {
        now.push_back(asked[i].get());
      } catch (const Error& error) {
        const int rank = static_cast<int>(i) + 1;
        const Error silent =
            error.blame() == Blame::PeerLost
                ? why_gone(rank)
                : unanswered(error, directory_.find(rank).worker, "what is active there");
        if (busy.empty()) throw silent;
        // Their work may be the reason.
        throw silent.with_text(silent.text() + "; still busy: " + busy);
      }
    }
    busy.clear();
    for (std::size_t rank = 0; rank < now.size(); ++rank) {
      if (now[rank].waiting == 0 && now[rank].running == 0) continue;
      busy += (busy.empty() ? "" : ", ") +
              describe(directory_.find(static_cast<int>(rank)).worker) + " (" +
              in_numbers(now[rank].waiting, "call waits", "calls wait") + ", " +
              in_numbers(now[rank].running, "function runs", "functions run") + ")";
    }
    if (busy.empty() && now == before) break;
    if (deadline.passed()) throw Error(Blame::Timeout, "still busy: " + busy);
    if (!busy.empty()) {
      say("still busy are " + busy +
          "; a function there, or a call that it has made, does not end");
      pause.wait(deadline);
    }
    before = std::move(now);
  }
  tell_verdict(Outcome(), Deadline::sooner(deadline, Deadline::in(kVerdict)));
}

void AgentCore::tell_verdict(const Outcome& verdict, Deadline deadline) {
  std::map<int, ShuttingDown> waiting;
  {
    std::lock_guard lock(mutex_);
    waiting.swap(shutting_down_);
  }
  if (waiting.empty()) return;
  for (const auto& [rank, one] : waiting) one.verdict.set(verdict);
  // Waits until the replies are sent: a worker that is told late, perhaps behind something large,
  // would find this one gone.
  thread_pool_->drive([this] { return replies_ == 0 || closed_; }, deadline);
}

}  // namespace weft::rpc
