// Who belongs to a job, and where each listens; in the store that the workers share. Functions
// block on the store, at most until a deadline. Usable from every thread.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/call/claims.h>
#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/records.h>
#include <weft/engine/call/types.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/routes.h>

namespace weft::rpc {

// Throws Caller where a name has letters that it must not have, or is too long or empty.
void check_name(const std::string& name);
// Throws Caller where one of the two was given a secret and the other none.
void check_secrets(const WorkerInfo& one, bool one_has, const WorkerInfo& other, bool other_has);

// No worker has ever had that name or rank, as far as the store says (Caller), or the one that had
// it has left or is lost (PeerLost).
class NotThere : public Error {
 public:
  using Error::Error;
  explicit NotThere(const Error& error) : Error(error) {}
};
bool is_not_there(const std::exception_ptr& error);
NotThere has_left(const Recipient& wanted);
// Throws Caller where another worker has that rank and is still joining, and has that one throw it
// as well. `before`: what the job's store holds of those that came before this one, if any had this
// rank. Blocks for at most two seconds.
void check_rank_is_free(transport::Bootstrap& before, const WorkerInfo& self);
// A worker of that rank was counted by the store, and does not join: the next one need not look for
// it.
void give_up_rank(transport::Bootstrap& store, int rank) noexcept;

class Directory {
 public:
  using Entry = WorkerEntry;

  // Those that are known, by rank and by name.
  class Entries {
   public:
    void add(int rank, Entry entry);  // in the place of one that has it
    void erase(int rank);
    // Null for nobody.
    const Entry* find(int rank) const;
    const Entry* find(const std::string& name) const;
    const std::map<int, Entry>& by_rank() const { return by_rank_; }

   private:
    std::map<int, Entry> by_rank_;
    std::unordered_map<std::string, int>
        ranks_;  // calls are made by name, and jobs have many workers
  };

  // `size` is the number of workers; without it they come and go, and a rank of -1 stands for one
  // that is free.
  Directory(std::shared_ptr<transport::Bootstrap> store, WorkerInfo self, std::optional<int> size,
            bool has_secret, WorkerDevices devices);

  // A text that all workers of this job share and nobody else knows.
  std::string token(Deadline deadline);
  // Publishes this worker, and gives its life; where the size is known, waits for all others, and
  // checks that all give the same size and that their names differ. `ask` is called for a worker
  // that has the wanted name or rank, where they come and go. Throws Caller for a name or rank that
  // is taken, where workers of the two kinds meet, where some have a secret and some have none, and
  // for device maps that do not fit the workers (where these come and go: those that are there);
  // Timeout naming who is missing.
  Generation join(const std::vector<transport::Offer>& offers,
                  const std::vector<transport::Offer>& device_offers, Deadline deadline,
                  const Claims::Ask& ask = {}, const WaitReports& reports = {});
  // This worker, with the rank that it has.
  WorkerInfo self() const;
  // Takes it out again, where workers come and go.
  void leave() noexcept;
  // As Claims::declare_lost(), where workers come and go.
  bool declare_lost(int rank, Generation generation, const std::string& why) {
    return claims_.declare_lost(rank, generation, why);
  }

  // Throws NotThere, naming who is there.
  Entry find(const Recipient& worker);
  // Who was found there when the store was last asked.
  std::optional<WorkerInfo> known(int rank) const;
  Recipient recipient(const std::string& name);
  Recipient recipient(int rank);
  Recipient recipient(const WorkerInfo& worker);
  // It may have gone: look in the store next time. False where workers neither come nor go.
  bool forget(int rank);
  // Unless it is of that life, or a later one. For good: that worker has left or is lost.
  void forget_before(int rank, Generation generation);
  // The record that the store has of a rank, where workers come and go. What it says is known from
  // now on.
  std::optional<WorkerRecord> look(int rank);
  // Those that are there, as far as is known without the store.
  std::vector<Member> members() const;
  // All, by rank.
  std::vector<WorkerInfo> workers();
  // The GPUs that calls use here, as far as the workers that have joined say.
  std::vector<int> gpus() const;

 private:
  Generation join_open(WorkerRecord record, const Claims::Ask& ask, Deadline deadline);
  Generation join_fixed(WorkerRecord record, Deadline deadline, const WaitReports& reports);
  // Throws Caller where the worker that came first gives another world size, and has those that
  // wait throw it as well.
  void check_size();
  [[noreturn]] void refuse(const std::string& why);
  // Throws what another worker has refused the job for.
  void throw_if_refused();
  [[noreturn]] void throw_refused(const std::string& why);
  // What the worker of that rank has published. Says, when it is due, who has not come, where this
  // is the first that has.
  transport::Bootstrap::Bytes published_by(int rank, Deadline deadline, Patience& patience);
  void wait_until_all_have_read(Deadline deadline, Patience& patience);
  std::string has_waited(std::chrono::milliseconds waited) const;
  std::set<int> ever_joined();
  std::map<int, WorkerRecord> read_all();
  Entries refresh();
  // Nothing where the store fails and it is not known from before either.
  std::optional<Entry> find_again(const Recipient& worker);
  template <class Key>
  NotThere not_there(const Key& wanted, const Entries& entries);
  template <class Key, class Read>
  auto look_up(const Key& key, Read read);
  void check_all_secrets() const;
  // With this worker, whether or not it has joined.
  std::vector<KnownDevices> known_devices() const;

  const std::shared_ptr<transport::Bootstrap> store_;
  WorkerInfo self_;  // has its rank once it has joined
  const std::optional<int> size_;
  const bool has_secret_;
  const WorkerDevices devices_;
  Claims claims_;
  bool counted_ = false;     // by join()
  bool is_refused_ = false;  // and has said that it gives its rank up
  mutable std::mutex mutex_;
  Entries entries_;
  std::map<int, WorkerRecord> ended_;  // of the workers that had a rank last and have left or are
                                       // lost; as of the last reading
  std::map<int, Entry> forgotten_;     // for who cannot ask the store
  std::map<long, int>
      joined_;  // who came as how manyth, as far as it was read: that does not change
};

}  // namespace weft::rpc
