// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <random>
#include <sstream>
#include <thread>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

constexpr std::size_t kLongestName = 127;
constexpr auto kRead = std::chrono::seconds(5);  // for reading a key that exists
// A waiting worker sees within this time that it is refused.
constexpr auto kAcknowledged = std::chrono::seconds(2);
constexpr auto kLastLook = std::chrono::milliseconds(50);

// Keys of a job whose size is known.
constexpr const char* kSize = "size";        // the first worker's rank and the size that it gives
constexpr const char* kRefused = "refused";  // why nobody can join any more
constexpr const char* kCame = "came";        // number of workers that came …
constexpr const char* kTold = "told";        // … and of those that have read why they are refused
// Set once the worker of that rank has joined or given up.
std::string done(int rank) { return "done/" + std::to_string(rank); }

std::string rank_is_taken(const WorkerInfo& self, const transport::Bootstrap::Bytes& record) {
  const std::string holder =
      record.empty() ? "another worker" : "'" + read_record(record).name + "'";
  return "rank " + std::to_string(self.rank) + " is taken by " + holder + ", and '" + self.name +
         "' asks for it as well; each worker of a job needs a rank of its own, and each of several "
         "jobs at one address an "
         "rpc::Options::group_name";
}

using Entries = Directory::Entries;

template <class Key>
const Directory::Entry* find_in(const Entries& entries, const Key& rank_or_name) {
  return entries.find(rank_or_name);
}
const Directory::Entry* find_in(const Entries& entries, const Recipient& worker) {
  const auto* found = entries.find(worker.rank);
  return found != nullptr && worker.fits(found->generation) ? found : nullptr;
}
const Directory::Entry* find_in(const Entries& entries, const WorkerInfo& worker) {
  const auto* found = entries.find(worker.rank);
  return found != nullptr && (worker.name.empty() || found->worker.name == worker.name) ? found
                                                                                        : nullptr;
}

std::string shown(int rank) { return "rank " + std::to_string(rank); }
std::string shown(const std::string& name) { return "'" + name + "'"; }
std::string shown(const Recipient& worker) { return shown(worker.rank); }
std::string shown(const WorkerInfo& worker) { return describe(worker); }

std::string list(const Entries& entries) {
  std::string known;
  for (const auto& [rank, entry] : entries.by_rank())
    known += (known.empty() ? "" : ", ") + describe(entry.worker);
  return known;
}

// The error for a name or rank that no worker has or ever had.
template <class Key>
NotThere nobody(const Key& wanted, const Entries& entries) {
  return NotThere(Blame::Caller, "the destination " + shown(wanted) +
                                     " cannot be found; the workers are " + list(entries));
}

// Says how the worker of a record has ended.
std::string fate(const WorkerRecord& record) {
  const std::string who = describe(WorkerInfo{record.name, record.rank});
  return record.stands(Standing::Lost) ? who + " is lost: " + record.why : who + " has left";
}

}  // namespace

void check_name(const std::string& name) {
  const bool fits = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == ':' || c == '-';
  });
  if (!name.empty() && name.size() <= kLongestName && fits) return;
  const std::string shown = name.size() > 32 ? name.substr(0, 32) + "…" : name;
  throw Error(Blame::Caller, "'" + shown + "' cannot be a worker's name: names are 1 to " +
                                 std::to_string(kLongestName) +
                                 " letters, digits, '_', ':' and '-'");
}

void check_secrets(const WorkerInfo& one, bool one_has, const WorkerInfo& other, bool other_has) {
  if (one_has == other_has) return;
  throw Error(Blame::Caller,
              describe(one_has ? one : other) + " was given a secret and " +
                  describe(one_has ? other : one) +
                  " none: give all workers of the job the same rpc::Options::secret, or none");
}

NotThere has_left(const Recipient& wanted) {
  return NotThere(
      Error(Blame::PeerLost, "the worker of rank " + std::to_string(wanted.rank) +
                                 " has left or is lost, and another worker has its rank")
          .with_ranks({wanted.rank}));
}

bool is_not_there(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const NotThere&) {
    return true;
  } catch (...) {
    return false;
  }
}

void Directory::Entries::add(int rank, Entry entry) {
  erase(rank);
  ranks_.insert_or_assign(entry.worker.name, rank);
  by_rank_.emplace(rank, std::move(entry));
}

void Directory::Entries::erase(int rank) {
  const auto found = by_rank_.find(rank);
  if (found == by_rank_.end()) return;
  const auto named = ranks_.find(found->second.worker.name);
  if (named != ranks_.end() && named->second == rank) ranks_.erase(named);
  by_rank_.erase(found);
}

const Directory::Entry* Directory::Entries::find(int rank) const {
  const auto found = by_rank_.find(rank);
  return found == by_rank_.end() ? nullptr : &found->second;
}

const Directory::Entry* Directory::Entries::find(const std::string& name) const {
  const auto named = ranks_.find(name);
  return named == ranks_.end() ? nullptr : find(named->second);
}

Directory::Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self,
                     std::optional<int> size, bool has_secret, WorkerDevices devices)
    : store_(std::move(store)),
      self_(std::move(self)),
      size_(size),
      has_secret_(has_secret),
      devices_(std::move(devices)),
      claims_(store_) {}

std::string Directory::token(Deadline deadline) {
  const auto random_text = [] {
    std::random_device random;
    std::string text;
    for (int i = 0; i < 4; ++i) text += std::to_string(random()) + "-";
    return group::to_bytes(text);
  };
  if (!size_) {  // in one step: a worker killed between two would keep all others waiting
    store_->compare_set("token", {}, random_text());
  } else if (store_->add("token/claim", 1) == 1 &&
             !store_->exists("token")) {  // it exists in an open job that goes on
    store_->set("token", random_text());
  }
  return group::to_text(store_->get("token", deadline));
}

Generation Directory::join(const std::vector<transport::Offer>& offers,
                           const std::vector<transport::Offer>& device_offers, Deadline deadline,
                           const Claims::Ask& ask, const WaitReports& reports) {
  const std::string other = size_ ? "kind/open" : "kind/fixed";
  store_->add(size_ ? "kind/fixed" : "kind/open", 1);
  counted_ = true;
  if (store_->add(other, 0) > 0) {
    if (size_)
      // Otherwise the open job would take nobody any more. leave() does the same for open jobs.
      store_->add("kind/fixed", -1);
    throw Error(Blame::Caller,
                "workers that were given a world size and workers that were not cannot be in one "
                "job: give all of them Options::world_size, or none (WORLD_SIZE counts as given, "
                "which launchers set: start workers that come and go without weft-run)");
  }
  WorkerRecord record;
  record.name = self_.name;
  record.rank = self_.rank;
  record.has_secret = has_secret_;
  record.devices = stored(devices_);
  for (const auto& offer : offers) record.offers.emplace_back(offer.transport, offer.address);
  for (const auto& offer : device_offers)
    record.device_offers.emplace_back(offer.transport, offer.address);
  if (!size_) return join_open(std::move(record), ask, deadline);
  try {
    return join_fixed(std::move(record), deadline, reports);
  } catch (...) {
    if (!is_refused_) give_up_rank(*store_, self_.rank);
    throw;
  }
}

Generation Directory::join_fixed(WorkerRecord record, Deadline deadline,
                                 const WaitReports& reports) {
  store_->add(kCame, 1);
  check_size();
  if (store_->add("rank/" + std::to_string(self_.rank), 1) != 1)
    refuse(rank_is_taken(self_, value_of(*store_, slot(self_.rank))));
  store_->set(slot(self_.rank), written(record));
  Entries all;
  Patience patience(reports);
  for (int rank = 0; rank < *size_; ++rank) {
    all.add(rank, entry_of(read_record(published_by(rank, deadline, patience))));
  }
  wait_until_all_have_read(deadline, patience);
  std::map<std::string, int> ranks;
  for (const auto& [rank, entry] : all.by_rank()) {
    const auto [place, is_new] = ranks.emplace(entry.worker.name, rank);
    if (is_new) continue;
    throw Error(Blame::Caller, "the name '" + entry.worker.name + "' is not unique: ranks " +
                                   std::to_string(place->second) + " and " + std::to_string(rank) +
                                   " have it; names must differ");
  }
  {
    MutexLock lock(mutex_);
    entries_ = std::move(all);
  }
  check_all_secrets();
  check_device_maps(known_devices(), /*more_may_come=*/false);
  return record.generation;
}

Generation Directory::join_open(WorkerRecord record, const Claims::Ask& ask, Deadline deadline) {
  refresh();  // reads and checks before anything is claimed
  check_all_secrets();
  check_device_maps(known_devices(), /*more_may_come=*/true);
  const Member joined = claims_.take(std::move(record), read_all(), ask, deadline);
  {
    MutexLock lock(mutex_);
    self_ = joined.worker;
  }
  refresh();
  return joined.generation;
}

WorkerInfo Directory::self() const {
  MutexLock lock(mutex_);
  return self_;
}

void Directory::check_all_secrets() const {
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : entries_.by_rank())
    check_secrets(self_, has_secret_, entry.worker, entry.has_secret);
}

std::vector<KnownDevices> Directory::known_devices() const {
  std::vector<KnownDevices> known;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : entries_.by_rank())
    known.push_back({entry.worker.name, entry.devices});
  if (entries_.find(self_.rank) == nullptr) known.push_back({self_.name, devices_});
  return known;
}

std::vector<int> Directory::gpus() const { return gpus_used(self_.name, known_devices()); }

// The workers that came earlier found nothing wrong and wait. They read why this one refuses to
// join.
void Directory::refuse(const std::string& why) {
  store_->compare_set(kRefused, {}, group::to_bytes(why));
  throw_refused(why);
}

void Directory::throw_if_refused() {
  const auto why = value_of(*store_, kRefused);
  if (!why.empty()) throw_refused(group::to_text(why));
}

// Rank 0 may host the store, in which others have yet to read the reason. It waits until they have.
void Directory::throw_refused(const std::string& why) {
  is_refused_ = true;
  give_up_rank(*store_, self_.rank);
  try {
    store_->add(kTold, 1);
    const Deadline end = Deadline::in(self_.rank == 0 ? kAcknowledged : 0s);
    for (group::Backoff pause; !end.passed() && store_->add(kTold, 0) < store_->add(kCame, 0);)
      pause.wait(end);
  } catch (const Error& error) {  // another process may have hosted it and ended
    log::debug("the job's store has ended before '" + self_.name + "': " + error.text());
  }
  throw Error(Blame::Caller, why);
}

void Directory::check_size() {
  const std::string own = std::to_string(self_.rank) + " " + std::to_string(*size_);
  if (store_->compare_set(kSize, {}, group::to_bytes(own))) return;
  std::istringstream first(group::to_text(value_of(*store_, kSize)));
  int rank = -1;
  int size = -1;
  if (!(first >> rank >> size) || size == *size_) return;
  refuse("rank " + std::to_string(rank) + " gives the world size " + std::to_string(size) +
         ", rank " + std::to_string(self_.rank) + " gives " + std::to_string(*size_) +
         "; all workers of a job give the same rpc::Options::world_size (or WORLD_SIZE)");
}

std::string Directory::has_waited(std::chrono::milliseconds waited) const {
  return "worker '" + self_.name + "' (rank " + std::to_string(self_.rank) + ") has waited " +
         describe_wait(waited) + " in rpc::init: ";
}

transport::Bootstrap::Bytes Directory::published_by(int rank, Deadline deadline,
                                                    Patience& patience) {
  for (group::Backoff pause; !store_->exists(slot(rank));
       pause.wait(Deadline::sooner(deadline, patience.next()))) {
    throw_if_refused();
    const bool is_due = patience.is_over();
    if (!is_due && !deadline.passed()) continue;
    std::vector<int> missing;
    bool speaks = true;  // the lowest rank that has come logs
    for (int other = 0; other < *size_; ++other) {
      const bool is_here = store_->exists(slot(other));
      if (!is_here) missing.push_back(other);
      speaks = speaks && !(is_here && other < self_.rank);
    }
    if (missing.empty()) continue;
    const std::string text = has_waited(patience.waited()) + ranks_have(missing) +
                             " not come; all " + std::to_string(*size_) +
                             " workers must be started, with the same address and world size";
    if (deadline.passed()) throw Error(Blame::Timeout, text).with_ranks(missing);
    if (speaks) log::warn(text);
  }
  return store_->get(slot(rank), Deadline::in(kRead));
}

// Rank 0 may host the store, so it must not end before the others have read all they need from it.
void Directory::wait_until_all_have_read(Deadline deadline, Patience& patience) {
  store_->add(done(self_.rank), 1);
  long read = store_->add("read", 1);
  if (self_.rank != 0) return;
  for (group::Backoff pause; read < *size_; read = store_->add("read", 0)) {
    const bool is_due = patience.is_over();
    if (is_due || deadline.passed()) {
      std::vector<int> missing;
      for (int rank = 1; rank < *size_; ++rank) {
        if (!store_->exists(done(rank))) missing.push_back(rank);
      }
      const std::string text =
          has_waited(patience.waited()) + "only " + std::to_string(read) + " of " +
          std::to_string(*size_) + " workers have joined" +
          (missing.empty()
               ? ""
               : ": " + ranks_have(missing) + " come, but not yet read the list of the others");
      if (deadline.passed()) throw Error(Blame::Timeout, text).with_ranks(missing);
      log::warn(text);
    }
    pause.wait(Deadline::sooner(deadline, patience.next()));
  }
}

void give_up_rank(transport::Bootstrap& store, int rank) noexcept {
  try {
    store.add(done(rank), 1);
  } catch (const Error& error) {
    log::debug("cannot tell the store that rank " + std::to_string(rank) +
               " does not join: " + error.text());
  }
}

void check_rank_is_free(transport::Bootstrap& before, const WorkerInfo& self) {
  std::optional<std::string> taken;
  const Deadline end = Deadline::in(kAcknowledged);
  try {
    // The other worker may have been counted and not have published itself yet. If it was killed,
    // nobody acknowledges.
    for (group::Backoff pause; !before.exists(done(self.rank)); pause.wait(end)) {
      if (end.passed()) return;
      if (taken.has_value() || !before.exists(slot(self.rank))) continue;
      taken = rank_is_taken(self, before.get(slot(self.rank), Deadline::in(kRead)));
      before.add(kCame, 1);
      before.compare_set(kRefused, {}, group::to_bytes(*taken));
    }
    if (taken) {
      before.add(kTold, 1);
      // This worker may host the store, in which the other one looks once more.
      std::this_thread::sleep_for(kLastLook);
    }
  } catch (const Error& error) {  // perhaps the other one hosted the store and has ended
    if (!taken || error.blame() != Blame::PeerLost) throw;
  }
  if (taken) throw Error(Blame::Caller, *taken);
}

void Directory::leave() noexcept {
  if (size_ || !counted_) return;
  try {
    if (claims_.give_back()) store_->add("kind/open", -1);
  } catch (const Error& error) {
    log::info(std::string("cannot tell the store that worker '" + self_.name + "' leaves: ") +
              error.what());
  }
}

std::set<int> Directory::ever_joined() {
  const long joined = store_->add("joined", 0);
  std::map<long, int> known;
  {
    MutexLock lock(mutex_);
    known = joined_;
  }
  for (long index = 1; index <= joined; ++index) {
    const std::string key = "joined/" + std::to_string(index);
    if (known.contains(index) || !store_->exists(key)) continue;  // it is about to be set
    known.emplace(
        index, rank_from(group::to_text(store_->get(key, Deadline::in(std::chrono::seconds(5))))));
  }
  std::set<int> ranks;
  for (const auto& [index, rank] : known) ranks.insert(rank);
  MutexLock lock(mutex_);
  joined_.merge(known);
  return ranks;
}

std::map<int, WorkerRecord> Directory::read_all() {
  std::map<int, WorkerRecord> all;
  for (const int rank : ever_joined()) {
    all.emplace(rank, read_record(store_->get(slot(rank), Deadline::in(std::chrono::seconds(5)))));
  }
  return all;
}

// Reads again which workers have joined or left. Of two threads that do so at once, the slower may
// store an older list, so each looks in the list that it has read itself.
Directory::Entries Directory::refresh() {
  Entries all;
  std::map<int, WorkerRecord> ended;
  for (auto& [rank, record] : read_all()) {
    if (record.stands(Standing::Joined)) all.add(rank, entry_of(record));
    if (!record.lives()) ended.emplace(rank, std::move(record));
  }
  MutexLock lock(mutex_);
  entries_ = all;
  ended_ = std::move(ended);
  return all;
}

std::optional<WorkerRecord> Directory::look(int rank) {
  const auto bytes = value_of(*store_, slot(rank));
  if (bytes.empty()) return std::nullopt;
  WorkerRecord record = read_record(bytes);
  std::optional<Entry> entry;
  if (record.stands(Standing::Joined)) entry = entry_of(record);
  MutexLock lock(mutex_);
  const Entry* const known = entries_.find(rank);
  if (entry) {
    if (known == nullptr || known->generation <= entry->generation)
      entries_.add(rank, std::move(*entry));
  } else if (known != nullptr && known->generation <= record.generation) {
    entries_.erase(rank);
  }
  return record;
}

// A worker that was in the job is gone (PeerLost), whether it is asked for by name, by rank or
// both. Only a worker that never was is the caller's mistake (Caller).
template <class Key>
NotThere Directory::not_there(const Key& wanted, const Entries& entries) {
  const std::string behind = "; the workers are " + list(entries);
  const auto gone = [&](const std::string& what) {
    return NotThere(Blame::PeerLost, "the destination " + what + behind);
  };
  std::string name;
  int rank = -1;
  if constexpr (std::is_same_v<Key, std::string>) {
    name = wanted;
  } else if constexpr (std::is_same_v<Key, WorkerInfo>) {
    name = wanted.name;
    rank = wanted.rank;
  } else if constexpr (std::is_same_v<Key, Recipient>) {
    rank = wanted.rank;
    if (wanted.generation != kAnyGeneration) return gone(shown(wanted) + " has left");
  } else {
    rank = wanted;
  }
  {
    MutexLock lock(mutex_);
    for (const auto& [its_rank, record] : ended_) {
      const bool fits = (rank < 0 || its_rank == rank) && (name.empty() || record.name == name);
      if (fits) return gone(fate(record));
    }
  }
  if (!name.empty() && Claims::was_ever(*store_, name))
    return gone(shown(wanted) + " has left or is lost");
  return nobody(wanted, entries);
}

// Finds the wanted entry, in the store if it is not known, and returns `read` of it.
template <class Key, class Read>
auto Directory::look_up(const Key& key, Read read) {
  {
    MutexLock lock(mutex_);
    if (const Entry* found = find_in(entries_, key)) return read(*found);
    if (size_) throw nobody(key, entries_);
  }
  const auto all = refresh();
  if (const Entry* found = find_in(all, key)) return read(*found);
  throw not_there(key, all);
}

Directory::Entry Directory::find(const Recipient& worker) {
  bool is_known_by_generation = false;
  {
    MutexLock lock(mutex_);
    const Entry* known = entries_.find(worker.rank);
    if (known != nullptr && worker.generation != kAnyGeneration &&
        worker.generation < known->generation)
      throw has_left(worker);
    is_known_by_generation = !size_ && worker.generation != kAnyGeneration && known == nullptr;
  }
  if (is_known_by_generation) {
    if (auto found = find_again(worker)) return *std::move(found);
  }
  return look_up(worker, [](const Entry& entry) { return entry; });
}

// The worker was found before, so its own record suffices. If the store has gone, the worker may
// still live.
std::optional<Directory::Entry> Directory::find_again(const Recipient& worker) {
  std::optional<WorkerRecord> record;
  try {
    record = look(worker.rank);
  } catch (const Error& error) {
    MutexLock lock(mutex_);
    const auto known = forgotten_.find(worker.rank);
    if (known == forgotten_.end() || !worker.fits(known->second.generation)) throw;
    log::debug("a worker is looked for at its last address: " + error.text());
    return known->second;
  }
  if (!record) return std::nullopt;
  if (record->generation > worker.generation) throw has_left(worker);
  if (record->generation == worker.generation && !record->lives()) {
    throw NotThere(Blame::PeerLost, "the destination " + fate(*record));
  }
  return record->stands(Standing::Joined) && worker.fits(record->generation)
             ? std::optional(entry_of(*record))
             : std::nullopt;
}

Recipient Directory::recipient(const std::string& name) {
  return look_up(name,
                 [](const Entry& entry) { return Recipient(entry.worker.rank, entry.generation); });
}

// The call goes to the worker that has the rank when it is sent.
Recipient Directory::recipient(int rank) {
  return look_up(rank, [](const Entry& entry) { return Recipient(entry.worker.rank); });
}

Recipient Directory::recipient(const WorkerInfo& worker) {
  return look_up(worker,
                 [](const Entry& entry) { return Recipient(entry.worker.rank, entry.generation); });
}

std::optional<WorkerInfo> Directory::known(int rank) const {
  MutexLock lock(mutex_);
  const Entry* const found = entries_.find(rank);
  return found == nullptr ? std::nullopt : std::optional(found->worker);
}

bool Directory::forget(int rank) {
  if (size_) return false;
  MutexLock lock(mutex_);
  if (const Entry* const known = entries_.find(rank); known != nullptr)
    forgotten_.insert_or_assign(rank, *known);
  entries_.erase(rank);
  return true;
}

void Directory::forget_before(int rank, Generation generation) {
  MutexLock lock(mutex_);
  const Entry* const found = entries_.find(rank);
  if (found != nullptr && found->generation < generation) entries_.erase(rank);
  const auto forgotten = forgotten_.find(rank);
  if (forgotten != forgotten_.end() && forgotten->second.generation < generation)
    forgotten_.erase(forgotten);
}

std::vector<Member> Directory::members() const {
  std::vector<Member> all;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : entries_.by_rank()) all.push_back(entry);
  return all;
}

std::vector<WorkerInfo> Directory::workers() {
  if (!size_) refresh();
  MutexLock lock(mutex_);
  std::vector<WorkerInfo> all;
  for (const auto& [rank, entry] : entries_.by_rank()) all.push_back(entry.worker);
  return all;
}

}  // namespace weft::call
