#include <algorithm>
#include <charconv>
#include <random>

#include <weft/base/log.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/group/pause.h>
#include <weft/engine/group/store.h>
#include <weft/engine/rpc/directory.h>

namespace weft::rpc {

namespace {

constexpr std::size_t kLongestName = 127;

using Bytes = transport::Bootstrap::Bytes;

// What the store holds of a worker.
struct Record {
  std::string name;
  int rank = -1;
  std::vector<std::pair<std::string, std::string>> offers;
  std::vector<std::pair<std::string, std::string>> device_offers;
  bool has_secret = false;
  bool gone = false;
  StoredDevices devices;
  Life life = 0;
  WEFT_FIELDS(name, rank, offers, device_offers, has_secret, gone, devices, life)
};

Bytes written(const Record& record) {
  const auto encoded = codec::Writer().write([&](codec::Packer& packer) { packer.pack(record); });
  const auto* data = reinterpret_cast<const Bytes::value_type*>(encoded.body.data());
  return Bytes(data, data + encoded.body.size());
}

Record read(const Bytes& bytes) {
  Record record;
  codec::Reader({}).read({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
                         [&](const msgpack::object& object) { object.convert(record); });
  return record;
}

Directory::Entry entry_of(const Record& record) {
  if (record.life < 0) throw Error(Blame::PeerLost, "a worker's record in the job's store has a life below 0");
  Directory::Entry entry{{{record.name, record.rank}, record.life}, {}, {}, record.has_secret, unstored(record.devices)};
  for (const auto& [transport, address] : record.offers) entry.offers.push_back({transport, address});
  for (const auto& [transport, address] : record.device_offers) entry.device_offers.push_back({transport, address});
  return entry;
}

int rank_in(const std::string& text) {
  int rank = -1;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (failure == std::errc() && end == text.data() + text.size() && rank >= 0) return rank;
  throw Error(Blame::PeerLost, "'" + text.substr(0, 40) + "' in the job's store is no rank of a worker");
}

std::string slot(long index) { return "worker/" + std::to_string(index); }

using Entries = Directory::Entries;

template <class Key>
const Directory::Entry* find_in(const Entries& entries, const Key& rank_or_name) {
  return entries.find(rank_or_name);
}
const Directory::Entry* find_in(const Entries& entries, const Recipient& worker) {
  const auto* found = entries.find(worker.rank);
  return found != nullptr && worker.fits(found->life) ? found : nullptr;
}
const Directory::Entry* find_in(const Entries& entries, const WorkerInfo& worker) {
  const auto* found = entries.find(worker.rank);
  return found != nullptr && (worker.name.empty() || found->worker.name == worker.name) ? found : nullptr;
}

std::string shown(int rank) { return "rank " + std::to_string(rank); }
std::string shown(const std::string& name) { return "'" + name + "'"; }
std::string shown(const Recipient& worker) { return shown(worker.rank); }
std::string shown(const WorkerInfo& worker) { return describe(worker); }

// Of a worker that was there.
std::vector<int> ranks_of(const Recipient& worker) { return {worker.rank}; }
template <class Named>
std::vector<int> ranks_of(const Named&) {
  return {};
}

// Found before; what a program names may never have been there.
bool was_there(const Recipient& worker) { return worker.life != kAnyLife; }
template <class Named>
bool was_there(const Named&) {
  return false;
}

template <class Key>
NotThere not_there(const Key& wanted, const Entries& entries) {
  std::string known;
  for (const auto& [rank, entry] : entries.by_rank()) known += (known.empty() ? "" : ", ") + describe(entry.worker);
  const std::string what = "the destination " + shown(wanted);
  if (was_there(wanted)) {
    return NotThere(Error(Blame::PeerLost, what + " has left; the workers are " + known).with_ranks(ranks_of(wanted)));
  }
  return NotThere(Blame::Caller, what + " cannot be found; the workers are " + known);
}

}  // namespace

void check_name(const std::string& name) {
  const bool fits = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == ':' || c == '-';
  });
  if (!name.empty() && name.size() <= kLongestName && fits) return;
  const std::string shown = name.size() > 32 ? name.substr(0, 32) + "…" : name;
  throw Error(Blame::Caller, "'" + shown + "' cannot be a worker's name: names are 1 to " + std::to_string(kLongestName) +
                                 " letters, digits, '_', ':' and '-'");
}

void check_secrets(const WorkerInfo& one, bool one_has, const WorkerInfo& other, bool other_has) {
  if (one_has == other_has) return;
  throw Error(Blame::Caller, describe(one_has ? one : other) + " was given a secret and " +
                                 describe(one_has ? other : one) +
                                 " none: give all workers of the job the same rpc::Options::secret, or none");
}

NotThere has_left(const Recipient& wanted) {
  return NotThere(Error(Blame::PeerLost, "the worker of rank " + std::to_string(wanted.rank) +
                                             " that was meant has left; another one has come after it")
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

Directory::Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self, std::optional<int> size, bool has_secret,
                     WorkerDevices devices)
    : store_(std::move(store)),
      self_(std::move(self)),
      size_(size),
      has_secret_(has_secret),
      devices_(std::move(devices)) {}

std::string Directory::token(Deadline deadline) {
  if (store_->add("token/claim", 1) == 1) {
    std::random_device random;
    std::string text;
    for (int i = 0; i < 4; ++i) text += std::to_string(random()) + "-";
    store_->set("token", group::to_bytes(text));
  }
  return group::to_text(store_->get("token", deadline));
}

Life Directory::join(const std::vector<transport::Offer>& offers, const std::vector<transport::Offer>& device_offers,
                     Deadline deadline) {
  const std::string other = size_ ? "kind/open" : "kind/fixed";
  store_->add(size_ ? "kind/fixed" : "kind/open", 1);
  counted_ = true;
  if (store_->add(other, 0) > 0) {
    if (size_)
      store_->add("kind/fixed", -1);  // or the open job would take nobody any more; leave() does it for its own kind
    throw Error(Blame::Caller,
                "workers that were given a world size and workers that were not cannot be in one job: give all of them "
                "Options::world_size, or none");
  }
  if (!size_) {  // before anything is claimed
    refresh();
    check_all_secrets();
    check_device_maps(known_devices(), /*more_may_come=*/true);
  }
  if (store_->add("rank/" + std::to_string(self_.rank), 1) != 1) {
    throw Error(Blame::Caller,
                "rank " + std::to_string(self_.rank) +
                    " is taken by another worker of this job; if it belongs to another job, give each a group_name" +
                    (size_ ? "" : "; one that was killed keeps its rank, so take another"));
  }
  Record record{self_.name, self_.rank, {}, {}, has_secret_, false, stored(devices_)};
  for (const auto& offer : offers) record.offers.emplace_back(offer.transport, offer.address);
  for (const auto& offer : device_offers) record.device_offers.emplace_back(offer.transport, offer.address);
  const bool fresh = store_->add("name/" + self_.name, 1) == 1;
  if (!size_) {
    if (!fresh) {
      store_->erase("rank/" + std::to_string(self_.rank));
      throw Error(Blame::Caller, "the name '" + self_.name +
                                     "' is not unique: another worker of this job has it, or one that was killed had it; "
                                     "names must differ");
    }
    published_ = true;
    record.life = static_cast<Life>(store_->add("lives/" + std::to_string(self_.rank), 1) - 1);
    store_->set(slot(self_.rank), written(record));
    if (!has_come_before()) {
      const long index = store_->add("joined", 1);
      store_->set("joined/" + std::to_string(index), group::to_bytes(std::to_string(self_.rank)));
    }
    refresh();
    return record.life;
  }
  store_->set(slot(self_.rank), written(record));
  Entries all;
  for (int rank = 0; rank < *size_; ++rank) {
    try {
      all.add(rank, entry_of(read(store_->get(slot(rank), deadline))));
    } catch (const Error& error) {
      throw error.within("worker '" + self_.name + "' waits for rank " + std::to_string(rank) + " of " +
                         std::to_string(*size_));
    }
  }
  wait_until_all_have_read(deadline);
  std::map<std::string, int> ranks;
  for (const auto& [rank, entry] : all.by_rank()) {
    const auto [place, is_new] = ranks.emplace(entry.worker.name, rank);
    if (is_new) continue;
    throw Error(Blame::Caller, "the name '" + entry.worker.name + "' is not unique: ranks " +
                                   std::to_string(place->second) + " and " + std::to_string(rank) +
                                   " have it; names must differ");
  }
  {
    std::lock_guard lock(mutex_);
    entries_ = std::move(all);
  }
  check_all_secrets();
  check_device_maps(known_devices(), /*more_may_come=*/false);
  return record.life;
}

void Directory::check_all_secrets() const {
  std::lock_guard lock(mutex_);
  for (const auto& [rank, entry] : entries_.by_rank()) check_secrets(self_, has_secret_, entry.worker, entry.has_secret);
}

std::vector<KnownDevices> Directory::known_devices() const {
  std::vector<KnownDevices> known;
  std::lock_guard lock(mutex_);
  for (const auto& [rank, entry] : entries_.by_rank()) known.push_back({entry.worker.name, entry.devices});
  if (entries_.find(self_.rank) == nullptr) known.push_back({self_.name, devices_});
  return known;
}

std::vector<int> Directory::gpus() const { return gpus_used(self_.name, known_devices()); }

// Rank 0 may host the store, and must not end before the others have what they need of it.
void Directory::wait_until_all_have_read(Deadline deadline) {
  long read = store_->add("read", 1);
  if (self_.rank != 0) return;
  group::Pause pause;
  while (read < *size_) {
    if (deadline.passed()) {
      throw Error(Blame::Timeout,
                  "only " + std::to_string(read) + " of " + std::to_string(*size_) + " workers have joined");
    }
    pause.wait(deadline);
    read = store_->add("read", 0);
  }
}

void Directory::leave() noexcept {
  if (size_ || !counted_) return;
  try {
    if (published_) {
      store_->set(slot(self_.rank), written({self_.name, self_.rank, {}, {}, has_secret_, true, {}}));
      store_->erase("name/" + self_.name);
      store_->erase("rank/" + std::to_string(self_.rank));
    }
    store_->add("kind/open", -1);
  } catch (const Error& error) {
    log::info(std::string("the store did not learn that worker '" + self_.name + "' leaves: ") + error.what());
  }
}

// Of its rank somebody, as far as was read: the list need not say so again.
bool Directory::has_come_before() const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(joined_, [this](const auto& one) { return one.second == self_.rank; });
}

std::set<int> Directory::ever_joined() {
  const long joined = store_->add("joined", 0);
  std::map<long, int> known;
  {
    std::lock_guard lock(mutex_);
    known = joined_;
  }
  for (long index = 1; index <= joined; ++index) {
    const std::string key = "joined/" + std::to_string(index);
    if (known.contains(index) || !store_->exists(key)) continue;  // it is about to
    known.emplace(index, rank_in(group::to_text(store_->get(key, Deadline::in(std::chrono::seconds(5))))));
  }
  std::set<int> ranks;
  for (const auto& [index, rank] : known) ranks.insert(rank);
  std::lock_guard lock(mutex_);
  joined_.merge(known);
  return ranks;
}

// Those that have joined or left meanwhile. Of two threads that do so at once the slower may put back what it read earlier:
// each looks in what it has read itself.
Directory::Entries Directory::refresh() {
  Entries all;
  for (const int rank : ever_joined()) {
    const Record record = read(store_->get(slot(rank), Deadline::in(std::chrono::seconds(5))));
    if (!record.gone) all.add(rank, entry_of(record));
  }
  std::lock_guard lock(mutex_);
  entries_ = all;
  return all;
}

// What `read` makes of the one that is wanted.
template <class Key, class Read>
auto Directory::look_up(const Key& key, Read read) {
  {
    std::lock_guard lock(mutex_);
    if (const Entry* found = find_in(entries_, key)) return read(*found);
    if (size_) throw not_there(key, entries_);
  }
  const auto all = refresh();
  if (const Entry* found = find_in(all, key)) return read(*found);
  throw not_there(key, all);
}

Directory::Entry Directory::find(const Recipient& worker) {
  {
    std::lock_guard lock(mutex_);
    const Entry* known = entries_.find(worker.rank);
    if (known != nullptr && worker.life != kAnyLife && worker.life < known->life) throw has_left(worker);
  }
  return look_up(worker, [](const Entry& entry) { return entry; });
}

Recipient Directory::recipient(const std::string& name) {
  return look_up(name, [](const Entry& entry) { return Recipient(entry.worker.rank, entry.life); });
}

// Whoever has it when the call goes out.
Recipient Directory::recipient(int rank) {
  return look_up(rank, [](const Entry& entry) { return Recipient(entry.worker.rank); });
}

Recipient Directory::recipient(const WorkerInfo& worker) {
  return look_up(worker, [](const Entry& entry) { return Recipient(entry.worker.rank, entry.life); });
}

std::optional<WorkerInfo> Directory::known(int rank) const {
  std::lock_guard lock(mutex_);
  const Entry* const found = entries_.find(rank);
  return found == nullptr ? std::nullopt : std::optional(found->worker);
}

bool Directory::forget(int rank) {
  if (size_) return false;
  std::lock_guard lock(mutex_);
  entries_.erase(rank);
  return true;
}

void Directory::forget_before(int rank, Life life) {
  std::lock_guard lock(mutex_);
  const Entry* const found = entries_.find(rank);
  if (found != nullptr && found->life < life) entries_.erase(rank);
}

std::vector<WorkerInfo> Directory::workers() {
  if (!size_) refresh();
  std::lock_guard lock(mutex_);
  std::vector<WorkerInfo> all;
  for (const auto& [rank, entry] : entries_.by_rank()) all.push_back(entry.worker);
  return all;
}

}  // namespace weft::rpc
