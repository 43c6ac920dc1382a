// SPDX-License-Identifier: Apache-2.0
// Claims: how a worker that comes and goes takes a rank and a name. The worker claims a rank with
// its own record and a name with a reference to that record, both put into the store by
// compare-and-set. A worker that finds one taken can therefore ask the holder whether it lives: a
// worker that was killed, at any instant, keeps neither. Functions block on the store.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/engine/call/records.h>
#include <weft/transport/bootstrap.h>

namespace weft::call {

class Claims {
 public:
  // Returns why that worker is lost, or nothing if it lives. Throws if this cannot be determined.
  using Ask = std::function<std::optional<Error>(const WorkerEntry& worker, Deadline deadline)>;

  explicit Claims(std::shared_ptr<transport::Bootstrap> store) : store_(std::move(store)) {}

  // Claims a rank, and the name in `record`. The rank is the record's; if that is -1, the rank that
  // the last worker of the name had, or else the lowest free rank from 1. `known` holds the records
  // of all ranks that were ever taken. Declares a holder lost if `ask` finds that it is. Throws
  // Caller if a holder lives; then nothing is claimed.
  Member take(WorkerRecord record, const std::map<int, WorkerRecord>& known, const Ask& ask,
              Deadline deadline);
  // Gives rank and name back. False if this worker had been declared lost, and others had taken
  // them back.
  bool give_back();
  // Whether a worker of that name was ever in the job.
  static bool was_ever(transport::Bootstrap& store, const std::string& name);
  // Marks that worker as lost in its record and announces the loss. False if it has left or has
  // already been marked.
  bool declare_lost(int rank, Generation generation, const std::string& why);

 private:
  void claim_rank(const std::map<int, WorkerRecord>& known, const Ask& ask, Deadline deadline);
  void claim_given_rank(const Ask& ask, Deadline deadline);
  bool try_rank(int rank, const transport::Bootstrap::Bytes& before);
  void claim_name(const Ask& ask, Deadline deadline);
  std::optional<WorkerRecord> holder_of_name(const transport::Bootstrap::Bytes& claim) const;
  void oust(const WorkerRecord& holder, const std::string& what, const Ask& ask, Deadline deadline);

  const std::shared_ptr<transport::Bootstrap> store_;
  WorkerRecord own_;
  // This worker's record as it is in the store; empty while no rank is claimed.
  transport::Bootstrap::Bytes written_;
};

}  // namespace weft::call
