// SPDX-License-Identifier: Apache-2.0
// Liveness probes: a worker is asked whether it still lives when a connection to it has ended or it
// does not answer, if anything here depends on it. A worker that does not answer a probe is lost,
// and everything that it holds ends.
#include <algorithm>

#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/inbound.h>

namespace weft::rpc {

void internal::alive() {}

namespace {

constexpr int kAsks = 3;  // attempts before a worker whose connection has ended counts as lost
// Attempts if the asking itself fails here, which says little about the worker.
constexpr int kAsksHere = 20;
constexpr auto kAskAgain = std::chrono::milliseconds(300);

}  // namespace

// Requires mutex_.
bool AgentCore::depends_on(int rank) const {
  const bool is_watched =
      present_.find(rank) || (news_.tells_of_losses() && !shutdown_began_ && !lost_.contains(rank));
  const bool decides = shutdown_began_ && parts_.self.rank == 0 && !lost_.contains(rank);
  return is_watched || decides || dependent_.contains(rank) || references_->concerns(rank) ||
         contexts_->concerns(rank);
}

// A connection may end while its worker lives, so the worker is asked before its references are
// given up or a shutdown fails. It is asked one question at a time: if a connection carried nothing
// but the question, its end is no news.
void AgentCore::look_after(int rank, Asked why) {
  if (closed_ || rank < 0 || rank == parts_.self.rank) return;
  {
    std::lock_guard lock(mutex_);
    if (!depends_on(rank)) return;
    const auto [inquiry, is_new] = inquiries_.try_emplace(rank, Inquiry{why});
    if (why == Asked::ConnectionEnded) inquiry->second.why = why;
    if (!is_new) return;
  }
  off_loop(rank, Task([self = shared_from_this(), rank] { self->ask_whether_alive(rank); }));
}

void AgentCore::ask_again(int rank) {
  {
    std::lock_guard lock(mutex_);
    if (!depends_on(rank)) {
      inquiries_.erase(rank);
      return;
    }
  }
  off_loop(rank, Task([self = shared_from_this(), rank] { self->ask_whether_alive(rank); }));
}

void AgentCore::ask_whether_alive(int rank) {
  const auto present = present_.find(rank);
  const Recipient asked(rank, present ? present->generation : kAnyLife);
  try {
    const CallOptions options{asked, std::chrono::seconds(10), MessageKind::Shutdown,
                              /*on_loop=*/true};
    call<detail::FunctionBody<&internal::alive>>(shared_from_this(), options, {})
        .on_done_light([self = shared_from_this(), asked](const Future<void>& answered) {
          self->asked_whether_alive(asked, answered.error(), /*was_sent=*/true);
        });
  } catch (...) {
    asked_whether_alive(asked, std::current_exception(), /*was_sent=*/false);
  }
}

// A failure on this side (the store, a lack of descriptors) is no sign that the other worker is
// gone. NotThere is one: nobody has the rank any more.
void AgentCore::asked_whether_alive(const Recipient& asked, const std::exception_ptr& error,
                                    bool was_sent) {
  if (closed_) return;
  const int rank = asked.rank;
  const std::optional<Error> why_not =
      error ? std::optional(to_error(error, Blame::PeerLost)) : std::nullopt;
  const bool is_slow = why_not && was_sent && why_not->blame() == Blame::Timeout;
  const bool failed_here = why_not && (!was_sent || why_not->blame() == Blame::Busy);
  const bool is_gone = error && is_not_there(error);
  bool is_lost = false;
  bool again = false;
  bool is_news = false;
  {
    std::lock_guard lock(mutex_);
    Inquiry& inquiry = inquiries_[rank];
    // The fault that broke one connection may have broken this one.
    again = why_not && !is_slow && !is_gone && ++inquiry.failed < (failed_here ? kAsksHere : kAsks);
    is_lost = why_not && !again && (!is_slow || inquiry.why == Asked::ConnectionEnded);
    if (is_lost && !is_slow) is_news = lost_.insert(rank).second && !shutdown_began_;
    if (!why_not) lost_.erase(rank);
    if (!again) inquiries_.erase(rank);
  }
  if (again) {
    after(kAskAgain, Task([weak = weak_from_this(), rank] {
            if (const auto alive = weak.lock()) alive->ask_again(rank);
          }));
  }
  if (!is_lost) return;
  const bool has_life = asked.generation != kAnyLife;
  const auto successor =
      has_life ? std::optional(static_cast<std::uint16_t>(asked.generation + 1)) : std::nullopt;
  references_->worker_lost(rank, successor);
  contexts_->worker_lost(rank, successor);
  thread_pool_->recall();  // wakes threads that wait in shutdown() for this worker
  if (parts_.world_size) {
    const Error lost(
        Blame::PeerLost,
        name_of(rank) + " is lost: it does not answer a liveness probe: " + why_not->text());
    const auto known = directory_.known(rank);  // a stranger may give a rank that nobody has
    if (is_news && known && news_.add_lost(*known, lost)) tell_news();
  } else if (const auto present = present_.find(rank);
             present && has_life && present->generation == asked.generation && !failed_here) {
    // If the worker is known to be gone, the others know as well: it has left, or another worker
    // declared it lost first.
    if (is_gone) return;
    thread_pool_->run_beside(Task([self = shared_from_this(), worker = *present, why = *why_not] {
      self->declare_lost(worker, why);
    }));
  }
}

void AgentCore::depend_on(int rank, int change) {
  std::lock_guard lock(mutex_);
  if ((dependent_[rank] += change) == 0) dependent_.erase(rank);
}

void AgentCore::heard_from(int rank) {
  std::lock_guard lock(mutex_);
  lost_.erase(rank);
}

bool AgentCore::meets(const WorkerInfo& worker, Generation generation) {
  {
    std::lock_guard lock(mutex_);
    const auto met = generations_.try_emplace(worker.rank, 0).first;
    if (generation <= met->second) return generation == met->second;
    met->second = generation;
  }
  end_predecessors(worker.rank, generation,
                   Error(Blame::PeerLost, "it has left, and " + describe(worker) + " has come"));
  return true;
}

void AgentCore::end_predecessors(int rank, Generation generation, const Error& why) {
  std::vector<std::shared_ptr<Inbound>> of_predecessor;
  {
    std::lock_guard lock(mutex_);
    Generation& met = generations_[rank];
    met = std::max(met, generation);
    if (met == generation) lost_.erase(rank);
    for (const auto& [key, inbound] : inbound_) {
      if (inbound->worker().rank == rank && inbound->generation() < generation)
        of_predecessor.push_back(inbound);
    }
  }
  for (const auto& inbound : of_predecessor) inbound->close(why);
  references_->worker_lost(rank, static_cast<std::uint16_t>(generation));
  contexts_->worker_lost(rank, static_cast<std::uint16_t>(generation));
}

bool AgentCore::has_successor(const WorkerGeneration& worker) const {
  if (parts_.world_size) return false;
  std::lock_guard lock(mutex_);
  const auto met = generations_.find(worker.rank);
  return met != generations_.end() && worker.is_before(static_cast<std::uint16_t>(met->second));
}

bool AgentCore::is_lost(int rank) const {
  std::lock_guard lock(mutex_);
  return lost_.contains(rank);
}

}  // namespace weft::rpc
