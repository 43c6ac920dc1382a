// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include <weft/engine/call/core.h>
#include <weft/engine/call/function.h>
#include <weft/engine/rref/references.h>
#include <weft/engine/rref/values.h>
#include <weft/profiling/trace/operation.h>

namespace weft::rref {

namespace {

// How long an owner keeps an entry whose creation has not come.
constexpr auto kExpect = std::chrono::minutes(10);  // at most twice this

}  // namespace

std::shared_ptr<weft::detail::Executor> Values::executor() const { return core_.thread_pool(); }

void Values::wrong_type(Id id, const std::type_info& wanted, const std::type_info& found) {
  // Both are OwnedValue<T>.
  const auto value_of = [](const std::type_info& owned) {
    const std::string text = call::spelled(owned);
    const auto begin = text.find('<') + 1;  // 0 if the name cannot be demangled
    return text.substr(begin, begin == 0 ? text.size() : text.rfind('>') - begin);
  };
  throw Error(Blame::Caller, "RRef " + to_text(id) + " is used as an RRef<" + value_of(wanted) +
                                 ">, and its value is a " + value_of(found) + "; use RRef<" +
                                 value_of(found) + ">");
}

namespace {

std::exception_ptr creator_gone(Id id) {
  return std::make_exception_ptr(
      Error(Blame::PeerLost, "its creator, rank " + std::to_string(rank_in(id)) +
                                 ", is gone, and the call that creates it did not come")
          .with_ranks({rank_in(id)}));
}

}  // namespace

std::exception_ptr Values::too_late(Id id) const {
  return core_.members().has_successor(call::made_by(id)) ? creator_gone(id) : nullptr;
}

std::shared_ptr<Owned> Values::find_or_expect(Id id, const Make& make) {
  const auto late = too_late(id);
  UniqueLock lock(mutex_);
  const auto known = entries_.find(id);
  // This call was sent before the references ended but came later; or its value will not come.
  if (known == entries_.end() ? ended_.contains(id)
                              : known->second.given_up && !known->second.owned) {
    const auto why = known == entries_.end() ? nullptr : known->second.given_up;
    lock.unlock();
    const auto gone = make();
    gone->fail(
        why ? why
            : std::make_exception_ptr(Error(Blame::Cancelled,
                                            "its creator gave it up, or its last reference had "
                                            "ended, before this call came")));
    return gone;
  }
  if (late && (known == entries_.end() || known->second.is_expected())) {
    lock.unlock();
    give_up(id, late);
    const auto gone = make();
    gone->fail(late);
    return gone;
  }
  Entry& entry = entries_[id];
  if (!entry.owned) entry.owned = make();
  expect(id, entry);
  return entry.owned;
}

// Starts the timer of an entry whose creation has not come, so that it does not stay for ever.
void Values::expect(Id id, Entry& entry) {
  if (!entry.is_expected() || entry.expiry) return;
  entry.expiry =
      core_.loop()->at(Deadline::in(entry.patience), Task([weak = core_.weak_from_this(), id] {
                         if (const auto core = weak.lock())
                           references_of(*core).values().expire(id);
                       }));
}

// Called when no creation has come in time: the creator is gone, perhaps since before the entry was
// made, or its message was lost.
void Values::expire(Id id) {
  bool is_over = false;
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end() || !found->second.is_expected()) return;
    Entry& entry = found->second;
    entry.expiry.reset();
    is_over = 2 * entry.patience > kExpect && !entry.is_announced(id);
    if (!is_over) {
      if (2 * entry.patience <= kExpect) entry.patience *= 2;
      expect(id, entry);
    }
  }
  if (is_over) {
    return give_up(id, std::make_exception_ptr(
                           Error(Blame::Timeout, "the call that creates it did not come")));
  }
  if (const auto late = too_late(id)) return give_up(id, late);
  core_.liveness().look_after(rank_in(id), call::Liveness::Asked::ByTheWay);
}

std::shared_ptr<Owned> Values::arrive(Id id, ForkId fork, const call::WorkerGeneration& holder,
                                      const Make& make) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "creation came", .sequence = id, .peer = holder.rank});
  UniqueLock lock(mutex_);
  // It was given up before it came: the value lives only until it is made.
  if (ended_.contains(fork)) {
    if (!entries_.contains(id)) {
      ended_.add(id);
      return make();
    }
  }
  Entry& entry = entries_[id];
  // If the entry has a value, that has failed with given_up already.
  const auto given_up = entry.owned ? nullptr : entry.given_up;
  if (!entry.owned) entry.owned = make();
  entry.arrived = true;
  entry.expiry.reset();
  if (!ended_.contains(fork)) entry.forks.emplace(fork, holder);
  const auto owned = entry.owned;
  if (!entry.is_kept()) {
    entries_.erase(id);
    ended_.add(id);
  }
  lock.unlock();
  if (given_up) owned->fail(given_up);  // other workers may have seen that error
  references_of(core_).end_if_late(holder);
  return owned;
}

void Values::add_fork(Id id, ForkId fork, const call::WorkerGeneration& holder,
                      const std::shared_ptr<Owned>& owned) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "fork", .sequence = id, .peer = holder.rank});
  const auto late = owned ? nullptr : too_late(id);
  UniqueLock lock(mutex_);
  if (ended_.contains(fork)) return;
  Entry& entry = entries_[id];
  if (owned && !entry.owned) {  // made here; without `owned` it may still be expected
    entry.owned = owned;
    entry.arrived = true;
    entry.expiry.reset();
  } else if (!entry.arrived && ended_.contains(id)) {
    entry.given_up = std::make_exception_ptr(
        Error(Blame::Cancelled, "it was given up before this reference was known"));
  }
  if (late && entry.is_expected() && !entry.owned) entry.given_up = late;
  entry.forks.emplace(fork, holder);
  expect(id, entry);
  lock.unlock();
  references_of(core_).end_if_late(holder);
}

// The caller destroys the result outside of mutex_, because a value may hold references.
Values::Entry Values::take_if_unused(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.is_kept()) return {};
  Entry unused = std::move(found->second);
  entries_.erase(found);
  ended_.add(id);
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "value released", .sequence = id});
  return unused;
}

void Values::hold_here(Id id, const std::shared_ptr<Owned>& owned) {
  MutexLock lock(mutex_);
  Entry& entry = entries_[id];
  if (!entry.owned) {  // made here, not expected
    entry.owned = owned;
    entry.arrived = true;
  }
  ++entry.here;
}

void Values::release_here(Id id) {
  Entry ended;
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end()) return;
    --found->second.here;
    ended = take_if_unused(id);
  }
  let_go(std::move(ended.owned));
}

// Destroys a value on the thread pool if this is the event loop; the value counts until it has been
// destroyed.
void Values::let_go(std::shared_ptr<Owned> value) {
  if (!value || value->ends_at_once() || !core_.loop()->inside()) return;
  struct Ending {
    Ending(Values* of, std::shared_ptr<call::AgentCore> kept, std::shared_ptr<Owned> last)
        : values(of), core(std::move(kept)), value(std::move(last)) {
      ++values->ending_;
    }
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;
    ~Ending() {
      value.reset();
      --values->ending_;
    }
    Values* values;
    std::shared_ptr<call::AgentCore> core;
    std::shared_ptr<Owned> value;
  };
  const auto core = core_.weak_from_this().lock();
  if (!core) return;
  core->thread_pool()->run(
      Task([ending = std::make_shared<Ending>(this, core, std::move(value))] {}));
}

void Values::remove_fork(Id id, ForkId fork, int holder) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "fork ended", .sequence = id, .peer = holder});
  Entry ended;
  bool is_given_up = false;
  {
    MutexLock lock(mutex_);
    const bool again = ended_.contains(fork);
    ended_.add(fork);
    const auto found = entries_.find(id);
    if (found == entries_.end()) return;
    const bool known = found->second.forks.erase(fork) > 0;
    // Other workers' forks are known before they end, unless their holders could not tell. The
    // creator's own fork is not known until its creation comes.
    const bool is_creators = holder == rank_in(id) && rank_in(fork) == rank_in(id);
    is_given_up = is_creators && !found->second.arrived && !known && !again;
    if (!is_given_up) ended = take_if_unused(id);
  }
  let_go(std::move(ended.owned));
  if (is_given_up) {
    give_up(id,
            std::make_exception_ptr(Error(
                Blame::Cancelled, "its creator gave it up before the call came that creates it")));
  }
}

bool Values::has_fork(Id id, ForkId fork) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return ended_.contains(fork) || (found != entries_.end() && found->second.forks.contains(fork));
}

bool Values::holds(Id id, ForkId fork) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second.forks.contains(fork);
}

void Values::end(ForkId fork) {
  MutexLock lock(mutex_);
  ended_.add(fork);
}

bool Values::has_ended(ForkId fork) const {
  MutexLock lock(mutex_);
  return ended_.contains(fork);
}

void Values::give_up(Id id, const std::exception_ptr& why) {
  Entry ended;
  std::shared_ptr<Owned> owned;
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end()) return ended_.add(id);
    if (found->second.arrived) return;
    found->second.given_up = why;
    owned = found->second.owned;
    ended = take_if_unused(id);
  }
  if (owned) owned->fail(why);
}

bool Values::concerns(int rank) const {
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    if (rank_in(id) == rank && entry.is_expected()) return true;
    for (const auto& [fork, holder] : entry.forks) {
      if (holder.rank == rank) return true;
    }
  }
  return false;
}

std::size_t Values::workers_lost(
    const std::function<bool(const call::WorkerGeneration&)>& is_lost) {
  std::vector<Entry> ended;
  std::vector<Id> expected;
  std::size_t forks = 0;
  {
    MutexLock lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      auto& held = it->second.forks;
      // A value that a third worker is to send may come all the same.
      if (is_lost(call::made_by(it->first)) && it->second.is_expected() &&
          !it->second.is_announced(it->first)) {
        expected.push_back(it->first);
      }
      std::erase_if(held, [&](const auto& fork) WEFT_REQUIRES(mutex_) {
        if (!is_lost(fork.second)) return false;
        ended_.add(fork.first);
        ++forks;
        return true;
      });
      if (!it->second.is_kept()) {
        ended.push_back(std::move(it->second));
        ended_.add(it->first);
        it = entries_.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (Entry& entry : ended) let_go(std::move(entry.owned));
  for (const Id id : expected) {
    give_up(id, creator_gone(id));
  }
  return forks;
}

void Values::close() {
  std::unordered_map<Id, Entry> entries;
  {
    MutexLock lock(mutex_);
    entries.swap(entries_);
  }
  const auto why =
      std::make_exception_ptr(Error(Blame::Cancelled, "the agent that owns it has left"));
  for (auto& [id, entry] : entries) {
    if (entry.owned) entry.owned->fail(why);
  }
}

void Values::count(rpc::DebugInfo& info) const {
  info.owner_rrefs = static_cast<std::size_t>(std::max(0, ending_.load()));
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    if (entry.forks.empty()) continue;
    ++info.owner_rrefs;
    std::unordered_set<int> holders;
    for (const auto& [fork, holder] : entry.forks) holders.insert(holder.rank);
    info.forks += holders.size();
  }
}

}  // namespace weft::rref
