// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <random>
#include <type_traits>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/fixed_job.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

constexpr std::size_t kLongestName = 127;

std::string shown(int rank) { return "rank " + std::to_string(rank); }
std::string shown(const std::string& name) { return "'" + name + "'"; }
std::string shown(const Recipient& worker) { return shown(worker.rank); }
std::string shown(const WorkerInfo& worker) { return describe(worker); }

std::string list(const WorkerTable& workers) {
  std::string known;
  for (const auto& [rank, entry] : workers.by_rank())
    known += (known.empty() ? "" : ", ") + describe(entry.worker);
  return known;
}

// The error for a name or rank that no worker has or ever had.
template <class Key>
NotThere nobody(const Key& wanted, const WorkerTable& workers) {
  return NotThere(Blame::Caller, "the destination " + shown(wanted) +
                                     " cannot be found; the workers are " + list(workers));
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

Directory::Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self,
                     std::optional<int> size, WorkerDevices devices)
    : store_(std::move(store)),
      size_(size),
      devices_(std::move(devices)),
      self_(std::move(self)),
      claims_(store_),
      records_(store_) {}

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
                std::string(size_ ? "this worker was given a world size, and others were not"
                                  : "this worker was given no world size, and others were") +
                    ": they cannot be in one job; give all of them Options::world_size, or none "
                    "(WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE and SLURM_NTASKS count as given, "
                    "which launchers set: start all workers that come and go, and those that they "
                    "join, without a launcher)");
  }
  WorkerRecord record;
  const WorkerInfo own = self();
  record.name = own.name;
  record.rank = own.rank;
  record.devices = stored(devices_);
  for (const auto& offer : offers) record.offers.emplace_back(offer.transport, offer.address);
  for (const auto& offer : device_offers)
    record.device_offers.emplace_back(offer.transport, offer.address);
  return size_ ? join_fixed(record, deadline, reports)
               : join_open(std::move(record), ask, deadline);
}

Generation Directory::join_fixed(const WorkerRecord& record, Deadline deadline,
                                 const WaitReports& reports) {
  FixedJob job(*store_, self(), *size_);
  try {
    known_.replace(job.join(record, deadline, reports), {});
    check_device_maps(known_devices(), /*more_may_come=*/false);
  } catch (...) {
    job.give_up();
    throw;
  }
  return record.generation;
}

Generation Directory::join_open(WorkerRecord record, const Claims::Ask& ask, Deadline deadline) {
  refresh();  // reads and checks before anything is claimed
  check_device_maps(known_devices(), /*more_may_come=*/true);
  const Member joined = claims_.take(std::move(record), records_.read_all(), ask, deadline);
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

std::vector<KnownDevices> Directory::known_devices() const {
  const WorkerInfo own = self();
  const WorkerTable workers = known_.table();
  std::vector<KnownDevices> known;
  for (const auto& [rank, entry] : workers.by_rank())
    known.push_back({entry.worker.name, entry.devices});
  if (workers.find(own.rank) == nullptr) known.push_back({own.name, devices_});
  return known;
}

std::vector<int> Directory::gpus() const { return gpus_used(self().name, known_devices()); }

void Directory::leave() noexcept {
  if (size_ || !counted_) return;
  try {
    if (claims_.give_back()) store_->add("kind/open", -1);
  } catch (const Error& error) {
    log::info(std::string("cannot tell the store that worker '" + self().name + "' leaves: ") +
              error.what());
  }
}

// Reads again which workers have joined or left. Of two threads that do so at once, the slower may
// store an older list, so each looks in the list that it has read itself.
WorkerTable Directory::refresh() {
  WorkerTable all;
  std::map<int, WorkerRecord> ended;
  for (auto& [rank, record] : records_.read_all()) {
    if (record.stands(Standing::Joined)) all.add(rank, entry_of(record));
    if (!record.lives()) ended.emplace(rank, std::move(record));
  }
  known_.replace(all, std::move(ended));
  return all;
}

std::optional<WorkerRecord> Directory::look(int rank) {
  auto record = records_.read(rank);
  if (record) known_.update(rank, *record);
  return record;
}

// A worker that was in the job is gone (PeerLost), whether it is asked for by name, by rank or
// both. Only a worker that never was is the caller's mistake (Caller).
template <class Key>
NotThere Directory::not_there(const Key& wanted, const WorkerTable& workers) {
  const std::string behind = "; the workers are " + list(workers);
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
  if (const auto record = known_.ended(rank, name)) return gone(fate(*record));
  if (!name.empty() && Claims::was_ever(*store_, name))
    return gone(shown(wanted) + " has left or is lost");
  return nobody(wanted, workers);
}

// Finds the wanted entry, in the store if it is not known, and returns `read` of it.
template <class Key, class Read>
auto Directory::look_up(const Key& key, Read read) {
  if (auto found = known_.find(key, read)) return *std::move(found);
  if (size_) throw nobody(key, known_.table());
  const WorkerTable all = refresh();
  if (const Entry* found = all.find(key)) return read(*found);
  throw not_there(key, all);
}

Directory::Entry Directory::find(const Recipient& worker) {
  if (worker.generation != kAnyGeneration) {
    const auto known = known_.generation(worker.rank);
    if (known && worker.generation < *known) throw has_left(worker);
    if (!size_ && !known) {
      if (auto found = find_again(worker)) return *std::move(found);
    }
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
    auto last = known_.forgotten(worker);
    if (!last) throw;
    log::debug("a worker is looked for at its last address: " + error.text());
    return last;
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

bool Directory::forget(int rank) {
  if (size_) return false;
  known_.forget(rank);
  return true;
}

std::vector<WorkerInfo> Directory::workers() {
  if (!size_) refresh();
  return known_.workers();
}

}  // namespace weft::call
