// SPDX-License-Identifier: Apache-2.0
// The other workers of the job, as one agent hears of them, and its reaction when one joins, leaves
// or is lost. Where workers come and go, each worker watches those of the next lower and the next
// higher rank by a connection. If a watched worker does not answer liveness probes, its watcher
// declares it lost in the job's store. All others hear of the loss from there, even those that
// never spoke to the lost worker (docs/rpc.md, "Open jobs").
//
// Owned by AgentCore. Usable from every thread; announcements arrive on the thread of the follower.
// alive() and declare_lost() block on the store.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include <weft/base/mutex.h>
#include <weft/engine/call/announcements.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/present_workers.h>
#include <weft/engine/call/types.h>

namespace weft::call {

class AgentCore;

class JobMembers {
 public:
  // `announcements` is the job's store over a connection of its own, where workers come and go: a
  // thread waits there.
  JobMembers(AgentCore& core, std::shared_ptr<transport::Bootstrap> announcements)
      : core_(core), announcements_(std::move(announcements)) {}

  // --- joining and leaving
  // Notes this worker's own generation.
  void begin();
  // Follows the announcements behind the first so many, which were made before this worker read the
  // list of workers.
  void follow(long announcements);
  // No announcement is heard any more. The caller drops the follower once this worker has left the
  // directory, whose announcement ends the follower's thread.
  [[nodiscard]] std::unique_ptr<Follower> stop_following();
  void close_news() { news_.close(); }

  // --- the program
  // Throws Caller for an empty function, and after the agent has left.
  void on_lost(LostCallback callback);
  void on_joined(JoinedCallback callback);
  bool alive(const Destination& destination);
  bool tells_of_losses() const { return news_.tells_of_losses(); }
  // Tells the program that the worker is lost, in a job of a fixed size.
  void tell_lost(const WorkerInfo& worker, const Error& why);

  // --- generations
  std::optional<Member> find(int rank) const { return present_.find(rank); }
  // Whether a worker of that rank is here, as far as is known, where workers come and go.
  bool is_present(int rank) const { return present_.find(rank).has_value(); }
  // `worker` has its rank in this generation: everything that its predecessors held ends. False if
  // a later generation is known, so that `worker` is outdated.
  bool meets(const WorkerInfo& worker, Generation generation);
  // Whether a later worker of that rank is known.
  bool has_successor(const WorkerGeneration& worker) const;
  // Declares a worker lost that does not answer this one.
  void declare_lost(const Member& worker, const Error& why);

 private:
  void heard(const Announcement& announcement);
  void joined(int rank);
  void watch_neighbours();
  // The worker has been declared lost: everything that it held, owned and was asked for ends here.
  // Does nothing the second time.
  void lost(const Member& worker, const Error& why);
  // Closes the connections of workers of that rank and of earlier generations. False if it was
  // known that they are gone: then what they held has ended.
  bool end_predecessors(int rank, Generation generation, const Error& why);
  void store_lost(const Error& why);
  void taken_for_lost(const std::string& why);
  void tell_news();

  AgentCore& core_;
  const std::shared_ptr<transport::Bootstrap> announcements_;
  PresentWorkers present_;  // where workers come and go
  News news_;
  // It also orders changes of present_ and their news, so that no thread tells of the next worker
  // of a rank or name in between. Liveness::heard_from() is called under it.
  mutable Mutex mutex_;
  std::unique_ptr<Follower> follower_ WEFT_GUARDED_BY(mutex_);
  // The latest generation that is known of each rank, where workers come and go.
  std::map<int, Generation> generations_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
