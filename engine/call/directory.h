// SPDX-License-Identifier: Apache-2.0
// The directory: the workers of a job and where each listens, kept in the store that the workers
// share. Owned by the agent's core. Functions block on the store, at most until a deadline, except
// for known(), self() and forget(). Usable from every thread; join() and leave() are called once.
//
// Its parts: the workers that it knows (known_workers.h), the records in the store (job_records.h),
// and how a worker joins: fixed_job.h if the number of workers is known, else claims.h.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/base/patience.h>
#include <weft/engine/call/claims.h>
#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/job_records.h>
#include <weft/engine/call/known_workers.h>
#include <weft/engine/call/records.h>
#include <weft/engine/call/types.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/routes.h>

namespace weft::call {

// Throws Caller if a name is empty, too long, or contains characters that names must not have.
void check_name(const std::string& name);

// The wanted worker is not in the job. Caller: as far as the store says, no worker ever had that
// name or rank. PeerLost: the worker that had it has left or is lost.
class NotThere : public Error {
 public:
  using Error::Error;
  explicit NotThere(const Error& error) : Error(error) {}
};
bool is_not_there(const std::exception_ptr& error);
NotThere has_left(const Recipient& wanted);

class Directory {
 public:
  using Entry = WorkerEntry;

  // `size` is the number of workers. Without it workers come and go, and a rank of -1 stands for
  // any free rank.
  Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self, std::optional<int> size,
            WorkerDevices devices);

  // A text that all workers of this job share and nobody else knows.
  std::string token(Deadline deadline);
  // Publishes this worker and returns its generation. If the size is known, waits for all other
  // workers, and checks that all give the same size and that their names differ. Where workers come
  // and go, calls `ask` for a worker that has the wanted name or rank. Throws Caller if the name or
  // rank is taken, if only some workers were given a world size, or if device maps do not fit the
  // workers (where these come and go: those present); Timeout, naming the missing workers.
  Generation join(const std::vector<transport::Offer>& offers,
                  const std::vector<transport::Offer>& device_offers, Deadline deadline,
                  const Claims::Ask& ask = {}, const WaitReports& reports = {});
  // This worker, with the rank that it has.
  WorkerInfo self() const;
  // Removes this worker from the job, where workers come and go.
  void leave() noexcept;
  // As Claims::declare_lost(), where workers come and go.
  bool declare_lost(int rank, Generation generation, const std::string& why) {
    return claims_.declare_lost(rank, generation, why);
  }

  // Throws NotThere, which lists the workers of the job.
  Entry find(const Recipient& worker);
  Recipient recipient(const std::string& name);
  Recipient recipient(int rank);
  Recipient recipient(const WorkerInfo& worker);
  // Forgets a worker that may have gone, so that the next lookup reads the store. False, and
  // nothing is forgotten, if the number of workers is fixed.
  bool forget(int rank);
  // Reads the record of a rank from the store, where workers come and go, and updates the known
  // workers by it.
  std::optional<WorkerRecord> look(int rank);
  // The workers when the store was last read.
  KnownWorkers& known() { return known_; }
  // All workers, by rank. Reads the store where workers come and go.
  std::vector<WorkerInfo> workers();
  // The GPUs that calls use here, as far as the maps of the workers that have joined say.
  std::vector<int> gpus() const;

 private:
  Generation join_open(WorkerRecord record, const Claims::Ask& ask, Deadline deadline);
  Generation join_fixed(const WorkerRecord& record, Deadline deadline, const WaitReports& reports);
  WorkerTable refresh();
  // Finds a worker that was found before: by its own record or, if the store fails, at its last
  // address. Returns nothing if the record does not tell. Throws NotThere if the worker has ended,
  // and the store's error if there is no last address.
  std::optional<Entry> find_again(const Recipient& worker);
  template <class Key>
  NotThere not_there(const Key& wanted, const WorkerTable& workers);
  template <class Key, class Read>
  auto look_up(const Key& key, Read read);
  // Includes this worker, whether or not it has joined.
  std::vector<KnownDevices> known_devices() const;

  const std::shared_ptr<transport::Bootstrap> store_;
  const std::optional<int> size_;
  const WorkerDevices devices_;
  mutable Mutex mutex_;
  WorkerInfo self_ WEFT_GUARDED_BY(mutex_);  // its rank is set when it has joined
  Claims claims_;
  JobRecords records_;
  KnownWorkers known_;
  bool counted_ = false;  // the store counts this worker
};

}  // namespace weft::call
