// SPDX-License-Identifier: Apache-2.0
// The directory: the workers of a job and where each listens, kept in the store that the workers
// share. Functions block on the store, at most until a deadline. Usable from every thread.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/claims.h>
#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/records.h>
#include <weft/engine/call/types.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/routes.h>

namespace weft::call {

// Throws Caller if a name is empty, too long, or contains characters that names must not have.
void check_name(const std::string& name);
// Throws Caller if only one of the two workers was given a secret.
void check_secrets(const WorkerInfo& one, bool one_has, const WorkerInfo& other, bool other_has);

// The wanted worker is not in the job. Caller: as far as the store says, no worker ever had that
// name or rank. PeerLost: the worker that had it has left or is lost.
class NotThere : public Error {
 public:
  using Error::Error;
  explicit NotThere(const Error& error) : Error(error) {}
};
bool is_not_there(const std::exception_ptr& error);
NotThere has_left(const Recipient& wanted);
// Throws Caller if another worker that is still joining has that rank, and makes that worker throw
// too. `before` is the store that an earlier worker of the same rank used. Blocks for at most two
// seconds.
void check_rank_is_free(transport::Bootstrap& before, const WorkerInfo& self);
// Tells the store that the worker of that rank, which it has counted, does not join, so that the
// next one need not look for it.
void give_up_rank(transport::Bootstrap& store, int rank) noexcept;

class Directory {
 public:
  using Entry = WorkerEntry;

  // The known workers, by rank and by name.
  class Entries {
   public:
    void add(int rank, Entry entry);  // replaces the entry of that rank
    void erase(int rank);
    // Null if there is none.
    const Entry* find(int rank) const;
    const Entry* find(const std::string& name) const;
    const std::map<int, Entry>& by_rank() const { return by_rank_; }

   private:
    std::map<int, Entry> by_rank_;
    // Index by name, because calls are made by name and jobs have many workers.
    std::unordered_map<std::string, int> ranks_;
  };

  // `size` is the number of workers. Without it workers come and go, and a rank of -1 stands for
  // any free rank.
  Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self, std::optional<int> size,
            bool has_secret, WorkerDevices devices);

  // A text that all workers of this job share and nobody else knows.
  std::string token(Deadline deadline);
  // Publishes this worker and returns its generation. If the size is known, waits for all other
  // workers, and checks that all give the same size and that their names differ. Where workers come
  // and go, calls `ask` for a worker that has the wanted name or rank. Throws Caller if the name or
  // rank is taken, if only some workers were given a world size, if only some were given a secret,
  // or if device maps do not fit the workers (where these come and go: those present); Timeout,
  // naming the missing workers.
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
  // The worker of that rank when the store was last read.
  std::optional<WorkerInfo> known(int rank) const;
  Recipient recipient(const std::string& name);
  Recipient recipient(int rank);
  Recipient recipient(const WorkerInfo& worker);
  // Forgets a worker that may have gone, so that the next lookup reads the store. False, and
  // nothing is forgotten, if the number of workers is fixed.
  bool forget(int rank);
  // Forgets for good a worker of that rank and of an earlier generation: it has left or is lost.
  void forget_before(int rank, Generation generation);
  // Reads the record of a rank from the store, where workers come and go, and updates the known
  // workers by it.
  std::optional<WorkerRecord> look(int rank);
  // The known workers. Does not read the store.
  std::vector<Member> members() const;
  // All workers, by rank. Reads the store where workers come and go.
  std::vector<WorkerInfo> workers();
  // The GPUs that calls use here, as far as the maps of the workers that have joined say.
  std::vector<int> gpus() const;

 private:
  Generation join_open(WorkerRecord record, const Claims::Ask& ask, Deadline deadline);
  Generation join_fixed(WorkerRecord record, Deadline deadline, const WaitReports& reports);
  // Throws Caller if the worker that came first gave another world size, and makes the workers that
  // wait throw too.
  void check_size();
  [[noreturn]] void refuse(const std::string& why);
  // Throws the reason if another worker has refused the job.
  void throw_if_refused();
  [[noreturn]] void throw_refused(const std::string& why);
  // Waits for the record that the worker of that rank publishes. When a report is due, logs which
  // ranks are missing, if this is the lowest rank that has come.
  transport::Bootstrap::Bytes published_by(int rank, Deadline deadline, Patience& patience);
  void wait_until_all_have_read(Deadline deadline, Patience& patience);
  std::string has_waited(std::chrono::milliseconds waited) const;
  std::set<int> ever_joined();
  std::map<int, WorkerRecord> read_all();
  Entries refresh();
  // Finds a worker that was found before: by its own record or, if the store fails, at its last
  // address. Returns nothing if the record does not tell. Throws NotThere if the worker has ended,
  // and the store's error if there is no last address.
  std::optional<Entry> find_again(const Recipient& worker);
  template <class Key>
  NotThere not_there(const Key& wanted, const Entries& entries);
  template <class Key, class Read>
  auto look_up(const Key& key, Read read);
  void check_all_secrets() const;
  // Includes this worker, whether or not it has joined.
  std::vector<KnownDevices> known_devices() const;

  const std::shared_ptr<transport::Bootstrap> store_;
  WorkerInfo self_;  // its rank is set when it has joined
  const std::optional<int> size_;
  const bool has_secret_;
  const WorkerDevices devices_;
  Claims claims_;
  bool counted_ = false;     // the store counts this worker
  bool is_refused_ = false;  // refused, and its rank given up
  mutable Mutex mutex_;
  Entries entries_ WEFT_GUARDED_BY(mutex_);
  // Records of ranks whose last worker has left or is lost, as of the last reading.
  std::map<int, WorkerRecord> ended_ WEFT_GUARDED_BY(mutex_);
  // Last known entries, used while the store fails.
  std::map<int, Entry> forgotten_ WEFT_GUARDED_BY(mutex_);
  // Ranks by the order in which they joined, as far as read. These entries never change.
  std::map<long, int> joined_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
