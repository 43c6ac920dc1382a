// SPDX-License-Identifier: Apache-2.0
// Reads the records of a job's workers, where these come and go, from the store. Owned by the
// agent's directory. Usable from every thread; functions block on the store.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <weft/base/mutex.h>
#include <weft/engine/call/records.h>
#include <weft/transport/bootstrap.h>

namespace weft::call {

class JobRecords {
 public:
  explicit JobRecords(std::shared_ptr<transport::Bootstrap> store) : store_(std::move(store)) {}

  // The records of all ranks that any worker has ever joined with, by rank.
  std::map<int, WorkerRecord> read_all();
  // The record of that rank; nothing if no worker ever had it.
  std::optional<WorkerRecord> read(int rank) const;

 private:
  std::set<int> ever_joined();

  const std::shared_ptr<transport::Bootstrap> store_;
  Mutex mutex_;
  // Ranks by the order in which they joined, as far as read. These entries never change.
  std::map<long, int> joined_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
