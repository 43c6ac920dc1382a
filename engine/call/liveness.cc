// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/liveness.h>
#include <weft/engine/call/peer.h>

void weft::rpc::internal::alive() {}

namespace weft::call {

namespace {

constexpr int kAsks = 3;  // attempts before a worker whose connection has ended counts as lost
// Attempts if the asking itself fails here, which says little about the worker.
constexpr int kAsksHere = 20;
constexpr auto kAskAgain = std::chrono::milliseconds(300);
constexpr int kKnocks = 3;  // the fault that broke one connection may break the next

}  // namespace

bool Liveness::depends_on(int rank) const {
  bool is_known_lost = false;
  {
    MutexLock lock(mutex_);
    if (depends_.contains(rank)) return true;
    is_known_lost = lost_.contains(rank);
  }
  if (core_.members().is_present(rank)) return true;
  const bool ends = core_.shutdown().has_begun();
  const bool is_watched = core_.members().tells_of_losses() && !ends && !is_known_lost;
  const bool decides = ends && core_.self().rank == 0 && !is_known_lost;
  return is_watched || decides || core_.extensions().concern(rank);
}

// A connection may end while its worker lives, so the worker is asked before its references are
// given up or a shutdown fails. It is asked one question at a time: if a connection carried nothing
// but the question, its end is no news.
void Liveness::look_after(int rank, Asked why) {
  if (core_.closed() || rank < 0 || rank == core_.self().rank || !depends_on(rank)) return;
  {
    MutexLock lock(mutex_);
    const auto [inquiry, is_new] = inquiries_.try_emplace(rank, Inquiry{why});
    if (why == Asked::ConnectionEnded) inquiry->second.why = why;
    if (!is_new) return;
  }
  core_.connections().off_loop(
      rank, Task([core = core_.shared_from_this(), rank] { core->liveness().ask(rank); }));
}

// The inquiry is taken out before depends_on() looks. So look_after(), on a thread on which this
// worker begins to depend on that one meanwhile, either is seen by depends_on() or asks itself.
void Liveness::ask_again(int rank) {
  Inquiry begun;
  {
    MutexLock lock(mutex_);
    const auto found = inquiries_.find(rank);
    if (found != inquiries_.end()) begun = found->second;
    inquiries_.erase(rank);
  }
  if (!depends_on(rank)) return;
  {
    MutexLock lock(mutex_);
    const auto [inquiry, is_new] = inquiries_.try_emplace(rank, begun);
    if (!is_new) {  // look_after() asks
      if (begun.why == Asked::ConnectionEnded) inquiry->second.why = begun.why;
      inquiry->second.failed = std::max(inquiry->second.failed, begun.failed);
      return;
    }
  }
  core_.connections().off_loop(
      rank, Task([core = core_.shared_from_this(), rank] { core->liveness().ask(rank); }));
}

void Liveness::ask(int rank) {
  const auto present = core_.members().find(rank);
  const Recipient to(rank, present ? present->generation : kAnyGeneration);
  try {
    const CallOptions options{to, std::chrono::seconds(10), MessageKind::Shutdown,
                              /*on_loop=*/true};
    issue<detail::FunctionBody<&rpc::internal::alive>>(core_.shared_from_this(), options, {})
        .on_done_light([core = core_.shared_from_this(), to](const Future<void>& answered) {
          core->liveness().asked(to, answered.error(), /*was_sent=*/true);
        });
  } catch (...) {
    asked(to, std::current_exception(), /*was_sent=*/false);
  }
}

// A failure on this side (the store, a lack of descriptors) is no sign that the other worker is
// gone. NotThere is one: nobody has the rank any more.
void Liveness::asked(const Recipient& asked, const std::exception_ptr& error, bool was_sent) {
  if (core_.closed()) return;
  Answer answer;
  if (error) {
    answer.why_not = to_error(error, Blame::PeerLost);
    answer.is_slow = was_sent && answer.why_not->blame() == Blame::Timeout;
    answer.failed_here = !was_sent || answer.why_not->blame() == Blame::Busy;
    answer.is_gone = is_not_there(error);
  }
  switch (judge(asked.rank, answer)) {
    case Verdict::Alive: return;
    case Verdict::AskAgain:
      core_.pauses().after(kAskAgain, Task([weak = core_.weak_from_this(), rank = asked.rank] {
                             if (const auto core = weak.lock()) core->liveness().ask_again(rank);
                           }));
      return;
    case Verdict::Lost: return lost(asked, answer, /*is_news=*/false);
    case Verdict::NewlyLost: return lost(asked, answer, /*is_news=*/true);
  }
}

Liveness::Verdict Liveness::judge(int rank, const Answer& answer) {
  MutexLock lock(mutex_);
  if (!answer.why_not) {
    lost_.erase(rank);
    inquiries_.erase(rank);
    return Verdict::Alive;
  }
  Inquiry& inquiry = inquiries_[rank];
  // The fault that broke one connection may have broken this one.
  if (!answer.is_slow && !answer.is_gone &&
      ++inquiry.failed < (answer.failed_here ? kAsksHere : kAsks)) {
    return Verdict::AskAgain;
  }
  const bool is_lost = !answer.is_slow || inquiry.why == Asked::ConnectionEnded;
  inquiries_.erase(rank);
  if (!is_lost) return Verdict::Alive;
  if (answer.is_slow) return Verdict::Lost;
  return lost_.insert(rank).second && !core_.shutdown().has_begun() ? Verdict::NewlyLost
                                                                    : Verdict::Lost;
}

void Liveness::lost(const Recipient& asked, const Answer& answer, bool is_news) {
  const int rank = asked.rank;
  const bool has_generation = asked.generation != kAnyGeneration;
  const auto generation = static_cast<std::uint16_t>(asked.generation);
  // If the worker has a successor, all that it held has been ended before, and the passes that the
  // successor takes part in must not fail.
  if (!has_generation || !core_.members().has_successor({rank, generation})) {
    core_.extensions().worker_lost(
        rank,
        has_generation ? std::optional(static_cast<std::uint16_t>(generation + 1)) : std::nullopt);
  }
  core_.loop()->recall();  // wakes threads that wait in shutdown() for this worker
  if (core_.identity().world_size) {
    const Error why(Blame::PeerLost,
                    core_.connections().name_of(rank) +
                        " is lost: it does not answer a liveness probe: " + answer.why_not->text());
    const auto known =
        core_.directory().known().worker(rank);  // a stranger may give a rank nobody has
    if (is_news && known) core_.members().tell_lost(*known, why);
  } else if (const auto present = core_.members().find(rank);
             present && has_generation && present->generation == asked.generation &&
             !answer.failed_here) {
    // If the worker is known to be gone, the others know as well: it has left, or another worker
    // declared it lost first.
    if (answer.is_gone) return;
    core_.thread_pool()->run_beside(
        Task([core = core_.shared_from_this(), worker = *present, why = *answer.why_not] {
          core->members().declare_lost(worker, why);
        }));
  }
}

void Liveness::depend_on(int rank, int change) {
  MutexLock lock(mutex_);
  if ((depends_[rank] += change) == 0) depends_.erase(rank);
}

void Liveness::heard_from(int rank) {
  MutexLock lock(mutex_);
  lost_.erase(rank);
}

bool Liveness::is_lost(int rank) const {
  MutexLock lock(mutex_);
  return lost_.contains(rank);
}

std::optional<int> Liveness::first_lost() const {
  MutexLock lock(mutex_);
  return lost_.empty() ? std::nullopt : std::optional(*lost_.begin());
}

std::optional<Error> Liveness::knock(const Directory::Entry& worker, Deadline deadline) {
  std::optional<Error> lost;
  OutgoingCalls& calls = core_.outgoing_calls();
  for (int time = 0; time < kKnocks; ++time) {
    const auto peer =
        std::make_shared<Peer>(core_.weak_from_this(), core_.self(), worker, DeviceMaps(),
                               std::make_shared<BytesInFlight>(0, nullptr), /*greets=*/false);
    const Function& function = detail::Called<detail::FunctionBody<&rpc::internal::alive>>::entered;
    Promise<void> promise(core_.thread_pool());
    const auto answered = promise.future();
    const auto connection = core_.connections().connect(*peer);
    const std::uint64_t id = calls.next_id();
    const auto limit = std::max(std::chrono::milliseconds(1), deadline.remaining());
    const CallOptions options{
        {worker.worker.rank, worker.generation}, limit, MessageKind::Shutdown};
    calls.waiting().add(id, function, options, Deadline::in(limit),
                        std::make_unique<PendingResult<void>>(std::move(promise)),
                        {.connection_number = connection.number, .in_flight = peer->in_flight()});
    peer->knock(connection, id);
    if (peer->standing_connection().number != connection.number) {  // it ended before add()
      calls.waiting().fail(id, Error(Blame::PeerLost, "its connection has ended"));
    }
    std::optional<Error> error;
    try {
      answered.get();
    } catch (const Error& caught) {
      error = caught;
    }
    peer->close(Error(Blame::Cancelled, "it was asked only for a liveness probe"));
    if (!error) return std::nullopt;
    if (!ends_connection(error->blame())) throw Error(*error);
    lost = std::move(error);
  }
  return lost;
}

}  // namespace weft::call
