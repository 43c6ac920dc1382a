// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/log.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/function.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/rref/control.h>
#include <weft/engine/rref/references.h>

namespace weft::rref {

namespace {

// How long an owner keeps an entry whose creation has not come.
constexpr auto kExpect = std::chrono::minutes(10);  // at most twice this
// How long an owner remembers an ended fork: longer than any message about it is retried or on its
// way.
constexpr auto kRemember = std::chrono::minutes(1);
constexpr std::size_t kMostBurials = 1 << 20;

// The error that uses of a value throw if it was not created. If it was to be made from another
// value that was not created, this is that value's error, so that a chain of any length reports
// only the first cause.
std::exception_ptr not_created(const std::string& reference, const std::exception_ptr& cause) {
  Blame blame = Blame::Remote;
  std::string why;
  std::vector<int> ranks;
  try {
    std::rethrow_exception(cause);
  } catch (const rpc::CreationError&) {
    return cause;
  } catch (const Error& error) {
    blame = error.blame();
    why = error.text();
    ranks = error.ranks();
  } catch (...) {
    why = rpc::text_of(cause);
  }
  return std::make_exception_ptr(
      rpc::CreationError(Error(blame, reference + " was not created: " + why).with_ranks(ranks)));
}

std::string on_its_owner(const Handle& handle) {
  return "RRef " + to_text(handle.id()) + " on " + describe(handle.owner());
}

}  // namespace

std::string to_text(std::uint64_t id) {
  return "(" + std::to_string(rank_in(id)) + ", " +
         std::to_string(id & ((std::uint64_t{1} << 48) - 1)) + ")";
}

void Owned::fail(const std::exception_ptr& cause) noexcept {
  if (end()) promise_.set_error(not_created("RRef " + to_text(id_), cause));
}

void Owned::let_go_of(std::shared_ptr<void> value) noexcept {
  const auto executor = promise_.future().executor();
  if (executor && executor->inside()) executor->run(Task([kept = std::move(value)] {}));
}

Handle::Handle(std::weak_ptr<rpc::AgentCore> core, Id id, rpc::Member owner,
               std::shared_ptr<Owned> owned)
    : core_(std::move(core)), id_(id), owner_(std::move(owner)), owned_(std::move(owned)) {
  references_of(*core_.lock()).hold_here(id_, owned_);
}

Handle::Handle(std::weak_ptr<rpc::AgentCore> core, Id id, ForkId fork, rpc::Member owner,
               Future<void> confirmed, std::optional<Future<void>> created, const Origin& origin)
    : core_(std::move(core)),
      id_(id),
      fork_(fork),
      owner_(std::move(owner)),
      confirmed_(std::move(confirmed)),
      created_(std::move(created)),
      origin_(origin) {
  const auto agent = core_.lock();
  references_of(*agent).enter(*this);
  if (confirmed_.done()) return;
  references_of(*agent).count_pending(+1);
  confirmed_.on_done_light([weak = core_](const Future<void>&) {
    if (const auto alive = weak.lock()) references_of(*alive).count_pending(-1);
  });
}

Handle::~Handle() {
  if (const auto core = core_.lock(); core && core->lifetime().is_inherited()) return;
  if (is_owner()) {
    if (const auto core = core_.lock()) references_of(*core).release_here(id_);
    return;
  }
  if (const auto core = core_.lock()) references_of(*core).forget(*this);
  confirmed_.on_done_light(
      [weak = core_, id = id_, fork = fork_, owner = to_owner()](const Future<void>&) {
        const auto core = weak.lock();
        if (core && !core->closed()) {
          control<&internal::user_delete>(core, owner, rpc::MessageKind::UserDelete, {id, fork},
                                          {.keeps_on = true});
        }
      });
}

std::shared_ptr<rpc::AgentCore> Handle::core() const {
  auto agent = core_.lock();
  if (agent) agent->lifetime().require_own();
  if (!agent || agent->closed()) {
    throw Error(Blame::Caller, "RRef " + to_text(id_) + " of " + describe(owner_.worker) +
                                   " is used after deletion: its agent has shut down or left");
  }
  return agent;
}

void Handle::require_created() const {
  const auto& ended = is_owner() ? std::optional(owned_->created()) : created_;
  if (!ended || !ended->done() || !ended->failed()) return;
  std::rethrow_exception(not_created(on_its_owner(*this), ended->error()));
}

Future<void> Handle::creation() const {
  const Future<void>& created = *created_;
  if (created.done() && !created.failed()) return created;
  Promise<void> promise(created.executor());
  created.on_done_light([promise, reference = on_its_owner(*this)](const Future<void>& ended) {
    if (!ended.failed()) return ended.forward_to(promise);
    promise.set_error(not_created(reference, ended.error()));
  });
  return promise.future();
}

std::string describe(const Handle& handle) {
  const std::string text = "RRef " + to_text(handle.id());
  if (handle.is_owner()) return text + ", owned here";
  return text + ", fork " + to_text(handle.fork()) + ", of " + describe(handle.owner());
}

std::uint64_t References::next_id() {
  return rpc::number_of(core_.self().rank, core_.identity().first_id() + next_++);
}

std::shared_ptr<weft::detail::Executor> References::executor() const { return core_.thread_pool(); }

void References::wrong_type(Id id, const std::type_info& wanted, const std::type_info& found) {
  // Both are OwnedValue<T>.
  const auto value_of = [](const std::type_info& owned) {
    const std::string text = rpc::spelled(owned);
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

std::exception_ptr References::too_late(Id id) const {
  return core_.members().has_successor(rpc::made_by(id)) ? creator_gone(id) : nullptr;
}

std::shared_ptr<Owned> References::find_or_expect(Id id, const Make& make) {
  const auto late = too_late(id);
  UniqueLock lock(mutex_);
  const auto known = entries_.find(id);
  // This call was sent before the references ended but came later; or its value will not come.
  if (known == entries_.end() ? buried_.contains(id)
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
void References::expect(Id id, Entry& entry) {
  if (!entry.is_expected() || entry.expiry) return;
  entry.expiry =
      core_.loop()->at(Deadline::in(entry.patience), Task([weak = core_.weak_from_this(), id] {
                         if (const auto core = weak.lock()) references_of(*core).expire(id);
                       }));
}

// Called when no creation has come in time: the creator is gone, perhaps since before the entry was
// made, or its message was lost.
void References::expire(Id id) {
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
  core_.liveness().look_after(rank_in(id), rpc::Liveness::Asked::ByTheWay);
}

std::shared_ptr<Owned> References::arrive(Id id, ForkId fork, const rpc::WorkerGeneration& holder,
                                          const Make& make) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "creation came", .sequence = id, .peer = holder.rank});
  UniqueLock lock(mutex_);
  // It was given up before it came: the value lives only until it is made.
  if (buried_.contains(fork)) {
    if (!entries_.contains(id)) {
      bury(id);
      return make();
    }
  }
  Entry& entry = entries_[id];
  // If the entry has a value, that has failed with given_up already.
  const auto given_up = entry.owned ? nullptr : entry.given_up;
  if (!entry.owned) entry.owned = make();
  entry.arrived = true;
  entry.expiry.reset();
  if (!buried_.contains(fork)) entry.forks.emplace(fork, holder);
  const auto owned = entry.owned;
  if (!entry.is_kept()) {
    entries_.erase(id);
    bury(id);
  }
  lock.unlock();
  if (given_up) owned->fail(given_up);  // other workers may have seen that error
  end_if_late(holder);
  return owned;
}

void References::add_fork(Id id, ForkId fork, const rpc::WorkerGeneration& holder,
                          const std::shared_ptr<Owned>& owned) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "fork", .sequence = id, .peer = holder.rank});
  const auto late = owned ? nullptr : too_late(id);
  UniqueLock lock(mutex_);
  if (buried_.contains(fork)) return;
  Entry& entry = entries_[id];
  if (owned && !entry.owned) {  // made here; without `owned` it may still be expected
    entry.owned = owned;
    entry.arrived = true;
    entry.expiry.reset();
  } else if (!entry.arrived && buried_.contains(id)) {
    entry.given_up = std::make_exception_ptr(
        Error(Blame::Cancelled, "it was given up before this reference was known"));
  }
  if (late && entry.is_expected() && !entry.owned) entry.given_up = late;
  entry.forks.emplace(fork, holder);
  expect(id, entry);
  lock.unlock();
  end_if_late(holder);
}

void References::end_if_late(const rpc::WorkerGeneration& holder) {
  if (core_.members().has_successor(holder))
    worker_lost(holder.rank, static_cast<std::uint16_t>(holder.generation + 1));
}

// Notes that a fork or a value has ended; their ids are never the same.
void References::bury(std::uint64_t ended) {
  if (!buried_.insert(ended).second) return;
  const auto now = Deadline::Clock::now();
  burials_.emplace_back(now, ended);
  while (now - burials_.front().first > kRemember || burials_.size() > kMostBurials) {
    buried_.erase(burials_.front().second);
    burials_.pop_front();
  }
}

// The caller destroys the result outside of mutex_, because a value may hold references.
References::Entry References::take_if_unused(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.is_kept()) return {};
  Entry unused = std::move(found->second);
  entries_.erase(found);
  bury(id);
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "value released", .sequence = id});
  return unused;
}

void References::hold_here(Id id, const std::shared_ptr<Owned>& owned) {
  MutexLock lock(mutex_);
  Entry& entry = entries_[id];
  if (!entry.owned) {  // made here, not expected
    entry.owned = owned;
    entry.arrived = true;
  }
  ++entry.here;
}

void References::release_here(Id id) {
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
void References::let_go(std::shared_ptr<Owned> value) {
  if (!value || value->ends_at_once() || !core_.loop()->inside()) return;
  struct Ending {
    Ending(References* of, std::shared_ptr<rpc::AgentCore> kept, std::shared_ptr<Owned> last)
        : references(of), core(std::move(kept)), value(std::move(last)) {
      ++references->ending_;
    }
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;
    ~Ending() {
      value.reset();
      --references->ending_;
    }
    References* references;
    std::shared_ptr<rpc::AgentCore> core;
    std::shared_ptr<Owned> value;
  };
  const auto core = core_.weak_from_this().lock();
  if (!core) return;
  core->thread_pool()->run(
      Task([ending = std::make_shared<Ending>(this, core, std::move(value))] {}));
}

void References::remove_fork(Id id, ForkId fork, int holder) {
  trace::Operation::note(core_.identity().member, trace::Kind::Reference,
                         {.name = "fork ended", .sequence = id, .peer = holder});
  Entry ended;
  bool is_given_up = false;
  {
    MutexLock lock(mutex_);
    const bool again = buried_.contains(fork);
    bury(fork);
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

bool References::has_fork(Id id, ForkId fork) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return buried_.contains(fork) || (found != entries_.end() && found->second.forks.contains(fork));
}

bool References::holds(Id id, ForkId fork) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second.forks.contains(fork);
}

bool References::keeps_parent_of(ForkId child) const {
  MutexLock lock(mutex_);
  return parents_.contains(child);
}

bool References::has_or_ends(ForkId fork) {
  MutexLock lock(mutex_);
  if (users_.contains(fork)) return true;
  bury(fork);
  return false;
}

bool References::has_given_back(ForkId fork) const {
  MutexLock lock(mutex_);
  return buried_.contains(fork);
}

void References::give_up(Id id, const std::exception_ptr& why) {
  Entry ended;
  std::shared_ptr<Owned> owned;
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end()) return bury(id);
    if (found->second.arrived) return;
    found->second.given_up = why;
    owned = found->second.owned;
    ended = take_if_unused(id);
  }
  if (owned) owned->fail(why);
}

void References::keep_parent(ForkId child, std::shared_ptr<Handle> parent,
                             const rpc::WorkerGeneration& receiver) {
  {
    MutexLock lock(mutex_);
    parents_.insert_or_assign(child, Parent{std::move(parent), receiver});
  }
  end_if_late(receiver);
}

void References::child_accepted(ForkId child) {
  Parent ended;
  MutexLock lock(mutex_);
  const auto found = parents_.find(child);
  if (found == parents_.end()) return;
  ended = std::move(found->second);
  parents_.erase(found);
}

void References::enter(const Handle& user) {
  MutexLock lock(mutex_);
  users_.emplace(user.fork(), &user);
}

void References::forget(const Handle& user) {
  MutexLock lock(mutex_);
  const auto found = users_.find(user.fork());
  if (found != users_.end() && found->second == &user) users_.erase(found);
}

std::vector<std::string> References::held() const {
  std::vector<std::string> all;
  MutexLock lock(mutex_);
  for (const auto& [fork, user] : users_) {
    const Origin& origin = user->origin();
    std::string text = describe(*user);
    if (origin.from >= 0) {
      text += ", sent by rank " + std::to_string(origin.from);
    } else {
      text += origin.function.empty() ? ", a copy"
                                      : ", made by remote<" + std::string(origin.function) + ">";
      if (origin.place.line > 0)
        text += " at " + std::string(origin.place.file) + ":" + std::to_string(origin.place.line);
    }
    all.push_back(std::move(text));
  }
  std::sort(all.begin(), all.end());
  return all;
}

bool References::concerns(int rank) const {
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    if (rank_in(id) == rank && entry.is_expected()) return true;
    for (const auto& [fork, holder] : entry.forks) {
      if (holder.rank == rank) return true;
    }
  }
  for (const auto& [child, parent] : parents_) {
    if (parent.receiver.rank == rank) return true;
  }
  return false;
}

void References::worker_lost(int rank, std::optional<std::uint16_t> successor) {
  const auto is_lost = [rank, successor](const rpc::WorkerGeneration& worker) {
    return worker.rank == rank && (!successor || worker.is_before(*successor));
  };
  std::vector<Entry> ended;
  std::vector<Id> expected;
  std::vector<Parent> parents;
  std::size_t forks = 0;
  {
    MutexLock lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      auto& held = it->second.forks;
      // A value that a third worker is to send may come all the same.
      if (is_lost(rpc::made_by(it->first)) && it->second.is_expected() &&
          !it->second.is_announced(it->first)) {
        expected.push_back(it->first);
      }
      std::erase_if(held, [&](const auto& fork) WEFT_REQUIRES(mutex_) {
        if (!is_lost(fork.second)) return false;
        bury(fork.first);
        ++forks;
        return true;
      });
      if (!it->second.is_kept()) {
        ended.push_back(std::move(it->second));
        bury(it->first);
        it = entries_.erase(it);
      } else {
        ++it;
      }
    }
    for (auto it = parents_.begin(); it != parents_.end();) {
      if (is_lost(it->second.receiver)) {
        parents.push_back(std::move(it->second));
        it = parents_.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (Entry& entry : ended) let_go(std::move(entry.owned));
  for (const Id id : expected) {
    give_up(id, creator_gone(id));
  }
  if (forks + parents.size() > 0) {
    log::info("rank " + std::to_string(rank) + " is gone; " + std::to_string(forks) +
              " references that it held have ended");
  }
}

void References::close() {
  std::unordered_map<Id, Entry> entries;
  std::unordered_map<ForkId, Parent> parents;
  {
    MutexLock lock(mutex_);
    entries.swap(entries_);
    parents.swap(parents_);
  }
  const auto why =
      std::make_exception_ptr(Error(Blame::Cancelled, "the agent that owns it has left"));
  for (auto& [id, entry] : entries) {
    if (entry.owned) entry.owned->fail(why);
  }
}

void References::count(rpc::DebugInfo& info) const {
  info.pending_users = static_cast<std::size_t>(std::max(0, pending_users_.load()));
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

std::shared_ptr<rpc::SentReferences> References::references_to(const rpc::Recipient& worker) {
  return std::make_shared<ForkWriter>(core_, worker);
}

void References::with_references_from(int worker,
                                      const std::function<void(rpc::ReceivedReferences&)>& read) {
  ForkReader forks(core_, worker);
  read(forks);
}

References& references_of(rpc::AgentCore& core) {
  return static_cast<References&>(core.extensions().references());
}

}  // namespace weft::rref
