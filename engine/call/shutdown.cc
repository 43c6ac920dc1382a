// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/liveness.h>
#include <weft/engine/call/shutdown.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/store/backoff.h>

namespace weft::rpc::internal {

Activity activity() { return call::current_call("activity()").core()->shutdown().activity(); }

Future<Outcome> join_shutdown() {
  const call::CallExecutionContext& here = call::current_call("join_shutdown()");
  return here.core()->shutdown().join(here.call().caller.rank, here.call().deadline);
}

// Asked by a higher rank that would report the wait for rank 0. Only the lowest rank that waits
// reports it.
bool awaits_verdict() {
  return call::current_call("awaits_verdict()").core()->shutdown().awaits_verdict();
}

// Asked of a worker that has not called shutdown() yet.
std::string doing() { return call::current_call("doing()").core()->incoming_calls().doing(); }

}  // namespace weft::rpc::internal

namespace weft::call {

namespace {

constexpr const char* kAllCall =
    "; all workers must call shutdown(), and one that must not wait calls leave()";
constexpr auto kVerdict = std::chrono::seconds(10);  // for the others to hear the verdict
// By how much, at most, a worker's limit is over earlier there than here, where it is counted from
// the arrival of its message.
constexpr auto kOnTheWay = std::chrono::seconds(1);

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
  for (const std::string& name : {detail::FunctionBody<&rpc::internal::activity>::name(),
                                  detail::FunctionBody<&rpc::internal::join_shutdown>::name()}) {
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

Activity Shutdown::activity() const {
  // Counts waiting calls first: anything that a call causes runs before the call stops waiting.
  Activity now;
  now.waiting = core_.outgoing_calls().waiting().count();
  now.running = core_.thread_pool()->active();
  now.issued = core_.outgoing_calls().waiting().issued();
  return now;
}

Future<Outcome> Shutdown::join(int rank, Deadline limit) {
  Promise<Outcome> promise;
  Waiting joins{promise, limit};
  {
    MutexLock lock(mutex_);
    const auto [known, is_new] = waiting_.try_emplace(rank, joins);
    if (!is_new) std::swap(known->second, joins);  // its earlier question fails outside the lock
  }
  core_.loop()->recall();  // wakes rank 0's thread, whose condition is called under the loop's lock
  if (!awaited_here_) {
    awaited_here_.emplace(core_.options().wait_reports);
    report_awaited();
  }
  return promise.future();
}

void Shutdown::report_awaited() {
  std::vector<int> ranks;
  {
    MutexLock lock(mutex_);
    if (began_ || core_.closed() || waiting_.empty()) return awaited_here_.reset();
    for (const auto& [rank, joins] : waiting_) ranks.push_back(rank);
  }
  if (awaited_here_->is_over()) {
    log::warn("shutdown() has been waiting for " + describe_wait(awaited_here_->waited()) + " on " +
              names_of(ranks) + " for " + describe(core_.self()) + ", which has not called it" +
              but(core_.incoming_calls().doing()) + kAllCall);
  }
  if (awaited_here_->next().is_never()) return;
  reports_awaited_ = core_.loop()->at(awaited_here_->next(), [weak = core_.weak_from_this()] {
    if (const auto self = weak.lock()) self->shutdown().report_awaited();
  });
}

std::string Shutdown::names_of(const std::vector<int>& ranks) const {
  std::string names;
  for (const int rank : ranks)
    names += (names.empty() ? "" : ", ") + core_.connections().name_of(rank);
  return names;
}

std::vector<int> Shutdown::missing() const {
  MutexLock lock(mutex_);
  std::vector<int> missing;
  for (int rank = 1; rank < *core_.identity().world_size; ++rank) {
    if (!waiting_.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

void Shutdown::run(const Graceful& options) {
  const auto limit = usable_limit(options.timeout, "rpc::Graceful::timeout");
  const std::string what = "the graceful shutdown of " + describe(core_.self());
  // A function that runs there would wait for its own end.
  if (!core_.closed() &&
      (weft::detail::thread_executor() == core_.thread_pool().get() || core_.loop()->inside())) {
    throw Error(
        Blame::Caller,
        what +
            " waits for all functions and continuations, and was asked for by one that this agent "
            "runs: call shutdown() on a thread of the program's own, or leave()");
  }
  {
    UniqueLock lock(mutex_);
    if (began_) {
      lock.unlock();
      return wait_for_other_thread(limit, what);
    }
    if (core_.closed()) return;
    began_ = true;
  }
  try {
    shut_down(limit, what);
  } catch (...) {
    ended_.set_error(std::current_exception());
    throw;
  }
  ended_.set();
}

// Waits for the shutdown that another thread has begun. Returns at once in a called function or a
// continuation, because that shutdown waits for its end.
void Shutdown::wait_for_other_thread(std::chrono::milliseconds limit,
                                     const std::string& what) const {
  const auto ended = ended_.future();
  if (ended.done() || weft::detail::thread_executor() == core_.thread_pool().get()) return;
  try {
    ended.wait(limit.count() == 0 ? kNoTimeout : limit);
  } catch (const Error&) {
    if (ended.done()) throw;
    throw Error(Blame::Timeout, what + ", which another thread has begun, is not over after " +
                                    weft::describe(limit));
  }
}

void Shutdown::shut_down(std::chrono::milliseconds limit, const std::string& what) {
  const Deadline deadline = limit.count() == 0 ? Deadline::never() : Deadline::in(limit);
  try {
    if (!core_.identity().world_size) {
      wait_for_own_calls(deadline);
    } else if (core_.self().rank != 0) {
      leave_with_others(limit);
    } else {
      wait_until_idle_everywhere(deadline);
    }
  } catch (const Error& error) {
    const Error why = error.within(what);
    tell_verdict(Outcome(why), Deadline::in(kVerdict));
    core_.leave();
    throw why;
  }
  report_held();
  core_.leave();
}

// Calls rank 0, and waits for its verdict.
void Shutdown::leave_with_others(std::chrono::milliseconds limit) {
  const int first = 0;
  // This thread sleeps meanwhile. If it drove the loop, the calls that still arrive would have to
  // be handed to other threads.
  Promise<Outcome> ended(nullptr);
  issue<detail::FunctionBody<&rpc::internal::join_shutdown>>(
      core_.shared_from_this(), {first, limit, MessageKind::Shutdown, /*on_loop=*/true}, {})
      .forward_to(ended);
  Outcome verdict;
  try {
    verdict = await_verdict(ended.future());
  } catch (const Error& error) {
    throw unanswered(error, core_.directory().find(first).worker,
                     "that all workers are idle: one has not called shutdown(), or calls and "
                     "functions go on");
  }
  if (verdict.failed()) throw verdict.error();
}

// Rank 0 itself reports which workers it waits for, unless it is stopped or cannot be reached.
Outcome Shutdown::await_verdict(const Future<Outcome>& verdict) {
  constexpr int kFirst = 0;
  awaits_verdict_ = true;
  Patience patience(core_.options().wait_reports);
  while (!ends_by(verdict, patience.next())) {
    if (!patience.is_over() || answers<detail::FunctionBody<&rpc::internal::alive>>({kFirst}) ||
        core_.closed())
      continue;
    std::vector<int> lower;
    for (int rank = 1; rank < core_.self().rank; ++rank) lower.push_back(rank);
    if (answers<detail::FunctionBody<&rpc::internal::awaits_verdict>>(lower) || verdict.done())
      continue;
    log::warn(describe(core_.self()) + " has waited " + describe_wait(patience.waited()) +
              " in shutdown(): " + core_.connections().name_of(kFirst) +
              ", which decides when all workers are idle, does not answer; its process is stopped "
              "(SIGCONT "
              "lets it go on), or its host cannot be reached; leave() waits for nobody");
  }
  return verdict.get();
}

// Whether one of these workers answers within kProbeLimit; if Body returns a bool, with true. Other
// errors than Timeout are answers too, unless Body returns a bool: if the worker is gone, the calls
// that wait for it fail by themselves.
template <class Body>
bool Shutdown::answers(const std::vector<int>& ranks) {
  using Answer = typename Body::Result;
  std::vector<Future<Answer>> asked;
  const Deadline limit = Deadline::in(kProbeLimit);
  for (const int rank : ranks) {
    try {
      asked.push_back(issue<Body>(core_.shared_from_this(),
                                  {rank, kProbeLimit, MessageKind::Shutdown, /*on_loop=*/true},
                                  {}));
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
void Shutdown::report_held() const {
  constexpr std::size_t kMost = 20;
  const auto held = core_.extensions().references().held();
  if (held.empty()) return;
  std::string text = describe(core_.self()) + " shuts down while its program still holds " +
                     in_numbers(held.size(), "reference", "references") + " to " +
                     (held.size() == 1 ? "a value" : "values") + " of other workers; drop " +
                     (held.size() == 1 ? "it" : "them") + " before shutdown():";
  for (std::size_t i = 0; i < std::min(held.size(), kMost); ++i) text += "\n  " + held[i];
  if (held.size() > kMost) text += "\n  and " + std::to_string(held.size() - kMost) + " more";
  log::warn(text);
}

void Shutdown::wait_for_own_calls(Deadline deadline) {
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

Error Shutdown::why_gone(int rank) const {
  const std::string worker = core_.connections().name_of(rank);
  MutexLock lock(mutex_);
  const auto found = waiting_.find(rank);
  if (found != waiting_.end() && found->second.limit.remaining() < kOnTheWay) {
    return Error(Blame::Timeout,
                 worker +
                     " has left: the limit of its shutdown() was over before all workers were idle")
        .with_ranks({rank});
  }
  return Error(Blame::PeerLost, worker + " is lost, or has left without shutdown()")
      .with_ranks({rank});
}

std::string Shutdown::doing_of(int rank) {
  try {
    const auto answer = issue<detail::FunctionBody<&rpc::internal::doing>>(
        core_.shared_from_this(), {rank, kProbeLimit, MessageKind::Shutdown, /*on_loop=*/true}, {});
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

// Says, each time a report is due, what rank 0 waits for.
class Shutdown::Reports {
 public:
  explicit Reports(AgentCore& core) : core_(core), patience_(core.options().wait_reports) {}
  Deadline next() { return patience_.next(); }
  bool is_due() { return patience_.is_over(); }
  void tell(const std::string& why) {
    log::warn(describe(core_.self()) + " has waited " + describe_wait(patience_.waited()) +
              " in shutdown(): " + why);
  }
  void tell_if_due(const std::string& why) {
    if (is_due()) tell(why);
  }

 private:
  AgentCore& core_;
  Patience patience_;
};

void Shutdown::wait_until_idle_everywhere(Deadline deadline) {
  Reports reports(core_);
  wait_until_all_have_called(deadline, reports);
  std::vector<Activity> before;
  std::string busy;  // the busy workers of the last complete round
  group::Backoff pause;
  for (;;) {
    auto now = ask_activity(deadline, busy, reports);
    busy = busy_among(now);
    if (busy.empty() && now == before) break;
    if (deadline.passed()) throw Error(Blame::Timeout, "still busy: " + busy);
    if (!busy.empty()) {
      reports.tell_if_due("still busy are " + busy +
                          "; a function there, or a call that it has made, does not end");
      pause.wait(deadline);
    }
    before = std::move(now);
  }
  tell_verdict(Outcome(), Deadline::sooner(deadline, Deadline::in(kVerdict)));
}

void Shutdown::wait_until_all_have_called(Deadline deadline, Reports& reports) {
  const std::size_t others = static_cast<std::size_t>(*core_.identity().world_size) - 1;
  const auto all_have_called = [&] {
    if (core_.closed() || core_.liveness().first_lost()) return true;
    MutexLock lock(mutex_);
    return waiting_.size() == others;
  };
  for (int rank = 1; rank <= static_cast<int>(others); ++rank) {
    // A worker that is gone will not call shutdown().
    core_.liveness().look_after(rank, Liveness::Asked::ByTheWay);
  }
  while (!core_.thread_pool()->drive(all_have_called, Deadline::sooner(deadline, reports.next())) &&
         !deadline.passed()) {
    if (!reports.is_due()) continue;
    const auto ranks = missing();
    if (ranks.empty()) continue;
    reports.tell("shutdown() has not been called by " + names_of(ranks) +
                 but(doing_of(ranks.front()), core_.connections().name_of(ranks.front())) +
                 kAllCall);
  }
  if (core_.closed()) throw Error(Blame::Cancelled, "leave() was called meanwhile");
  std::optional<Error> gone;
  if (const auto lost = core_.liveness().first_lost()) gone = why_gone(*lost);
  if (gone && gone->blame() == Blame::PeerLost) throw Error(*gone);
  if (const auto ranks = missing(); !ranks.empty()) {
    throw Error(Blame::Timeout, "shutdown() has not been called in time by " + names_of(ranks))
        .with_ranks(ranks);
  }
  if (gone) throw Error(*gone);
}

std::vector<Activity> Shutdown::ask_activity(Deadline deadline, const std::string& busy,
                                             Reports& reports) {
  std::vector<Activity> now{activity()};
  std::vector<Future<Activity>> asked;
  for (int rank = 1; rank < *core_.identity().world_size; ++rank) {
    const auto limit = deadline.is_never()
                           ? std::chrono::milliseconds(0)
                           : std::max(deadline.remaining(), std::chrono::milliseconds(1));
    asked.push_back(issue<detail::FunctionBody<&rpc::internal::activity>>(
        core_.shared_from_this(), {rank, limit, MessageKind::Shutdown, /*on_loop=*/true}, {}));
  }
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const int rank = static_cast<int>(i) + 1;
    while (!ends_by(asked[i], reports.next())) {
      reports.tell_if_due(
          core_.connections().name_of(rank) +
          " does not answer; its process is stopped (SIGCONT lets it go on), or its host cannot "
          "be reached; leave() waits for nobody");
    }
    try {
      now.push_back(asked[i].get());
    } catch (const Error& error) {
      const Error silent =
          error.blame() == Blame::PeerLost
              ? why_gone(rank)
              : unanswered(error, core_.directory().find(rank).worker, "what is active there");
      if (busy.empty()) throw silent;
      // Their work may be the reason.
      throw silent.with_text(silent.text() + "; still busy: " + busy);
    }
  }
  return now;
}

std::string Shutdown::busy_among(const std::vector<Activity>& all) {
  std::string busy;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Activity& now = all[rank];
    if (now.waiting == 0 && now.running == 0) continue;
    busy += (busy.empty() ? "" : ", ") +
            describe(core_.directory().find(static_cast<int>(rank)).worker) + " (" +
            in_numbers(now.waiting, "call waits", "calls wait") + ", " +
            in_numbers(now.running, "function runs", "functions run") + ")";
  }
  return busy;
}

std::map<int, Shutdown::Waiting> Shutdown::take_waiting() {
  MutexLock lock(mutex_);
  return std::exchange(waiting_, {});
}

void Shutdown::tell_verdict(const Outcome& verdict, Deadline deadline) {
  const auto waiting = take_waiting();
  if (waiting.empty()) return;
  for (const auto& [rank, one] : waiting) one.verdict.set(verdict);
  // Waits until the replies are sent: a worker that is told late, perhaps behind something large,
  // would find this one gone.
  core_.thread_pool()->drive(
      [this] { return core_.incoming_calls().replies() == 0 || core_.closed(); }, deadline);
}

}  // namespace weft::call
