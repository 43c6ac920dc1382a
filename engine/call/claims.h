// The rank and the name of one worker among those that come and go. A claim is the worker's record
// itself, which compare-and-set puts into the store, so whoever finds one taken can ask its holder
// for a sign of life: a worker that was killed at any instant keeps neither rank nor name.
// Functions block on the store.
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

namespace weft::rpc {

class Claims {
 public:
  // Gives why that worker is lost; nothing where it lives. Throws where that cannot be found out.
  using Ask = std::function<std::optional<Error>(const WorkerEntry& worker, Deadline deadline)>;

  explicit Claims(std::shared_ptr<transport::Bootstrap> store) : store_(std::move(store)) {}

  // Takes the record's rank, or, where that is -1, the one that the last worker of its name had, or
  // the lowest from 1 that is free; and its name. `known` are the records of all ranks that were
  // ever taken. A holder that is lost is declared so. Throws Caller where a holder lives; then
  // nothing is claimed.
  Member take(WorkerRecord record, const std::map<int, WorkerRecord>& known, const Ask& ask,
              Deadline deadline);
  // Gives both back. False where this worker was declared lost, and others have taken them back.
  bool give_back();
  // Whether a worker of that name has ever been in the job.
  static bool was_ever(transport::Bootstrap& store, const std::string& name);
  // Says in that worker's record, and to all, that it is lost. False where it has left, or somebody
  // has said so before.
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
  transport::Bootstrap::Bytes
      written_;  // the record as it stands in the store; empty: no rank is claimed
};

}  // namespace weft::rpc
