// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <string>

#include <weft/base/deadline.h>
#include <weft/engine/call/job_records.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

constexpr auto kRead = std::chrono::seconds(5);  // for reading a key that exists

}  // namespace

std::map<int, WorkerRecord> JobRecords::read_all() {
  std::map<int, WorkerRecord> all;
  for (const int rank : ever_joined())
    all.emplace(rank, read_record(store_->get(slot(rank), Deadline::in(kRead))));
  return all;
}

std::optional<WorkerRecord> JobRecords::read(int rank) const {
  const auto bytes = value_of(*store_, slot(rank));
  if (bytes.empty()) return std::nullopt;
  return read_record(bytes);
}

std::set<int> JobRecords::ever_joined() {
  const long joined = store_->add("joined", 0);
  std::map<long, int> known;
  {
    MutexLock lock(mutex_);
    known = joined_;
  }
  for (long index = 1; index <= joined; ++index) {
    const std::string key = "joined/" + std::to_string(index);
    if (known.contains(index) || !store_->exists(key)) continue;  // it is about to be set
    known.emplace(index, rank_from(group::to_text(store_->get(key, Deadline::in(kRead)))));
  }
  std::set<int> ranks;
  for (const auto& [index, rank] : known) ranks.insert(rank);
  MutexLock lock(mutex_);
  joined_.merge(known);
  return ranks;
}

}  // namespace weft::call
