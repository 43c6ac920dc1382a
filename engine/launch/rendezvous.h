// A weft-run's part in the rendezvous of its job: joins the rounds, tells what becomes of its
// ranks, hears what becomes of the others', and notices nodes that are lost. A thread of its own
// gives heartbeats; the rest is for one thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/patience.h>
#include <weft/engine/launch/rendezvous_state.h>
#include <weft/engine/launch/shared_store.h>

namespace weft::launch {

class Rendezvous {
 public:
  // The defaults are torchrun's.
  struct Settings {
    RendezvousLimits limits;
    std::chrono::milliseconds join_timeout = std::chrono::seconds(600);  // until a round runs
    std::chrono::milliseconds last_call_timeout =
        std::chrono::seconds(30);  // for more than the least nodes, at first
    std::chrono::milliseconds keep_alive_interval = std::chrono::seconds(5);
    int keep_alive_max_attempt = 3;  // intervals without a heartbeat until a node is lost
    std::chrono::milliseconds monitor_interval = std::chrono::milliseconds(100);
    WaitReports wait_reports =
        default_wait_reports();  // after how long a node that waits for others says so again
  };

  // This node in a round that runs.
  struct Place {
    int round = 0;
    int node_rank = 0;
    int nodes = 1;
    int first_rank = 0;
    int world_size = 1;
    std::string master_address;
    int master_port = 0;
    int restarts = 0;
    std::string cause;  // of the round; "" for the first
  };

  // Throws Busy where there is no thread for the heartbeats.
  Rendezvous(std::shared_ptr<SharedStore> store, Settings settings, Node self);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Blocks until a round runs that this node takes part in, with a new port of it. Asks `goes_on`
  // in between, and tells whom it waits for. Nothing where it is to go on no more, or where the job
  // has ended: see end(). Throws Timeout when too few nodes come, Caller where the job has other
  // limits than this node, PeerLost when the store is lost.
  std::optional<Place> join(int port, const std::function<bool()>& goes_on,
                            const std::function<void(const std::string&)>& tell);

  enum class News { None, NextRound, End };
  // Whether the round goes on. Asks the store when it is time to.
  News look();
  // All ranks of this node have ended well. The job has when all nodes' have: look() tells.
  void finished();
  // One has failed. Returns whether another round follows.
  bool failed(const std::string& why, int code);
  const std::optional<JobEnd>& end() const { return end_; }
  // After how long a node that gives no heartbeats is lost.
  std::chrono::milliseconds patience() const {
    return settings_.keep_alive_interval * settings_.keep_alive_max_attempt;
  }
  // Goes out of the job; the others go on without this node where they may. Who hosts the store
  // waits, for some time, until all have heard of the job's end.
  void leave(const std::function<bool()>& goes_on) noexcept;

 private:
  using Clock = Deadline::Clock;
  struct Pulse {
    std::int64_t count = 0;
    Clock::time_point since;  // when it last changed
  };

  // Changes the state in the store, again and after ever longer pauses where somebody else was
  // faster; returns it as it is then. Throws Timeout where somebody always was.
  RendezvousState update(Deadline deadline, const std::function<void(RendezvousState&)>& change);
  RendezvousState update(const std::function<void(RendezvousState&)>& change) {
    return update(Deadline::in(settings_.join_timeout), change);
  }
  // Of all whose heartbeats are to be watched, those that give none any more.
  std::vector<std::string> lost(const RendezvousState& state);
  Place place_of(const RendezvousState& state) const;
  void beat();

  const std::shared_ptr<SharedStore> store_;
  const Settings settings_;
  Node self_;
  int round_ = -1;
  std::optional<JobEnd> end_;
  std::map<std::string, Pulse> pulses_;
  Clock::time_point next_look_;
  Clock::time_point last_watch_;

  std::mutex mutex_;  // of what follows
  std::condition_variable wakes_;
  bool stops_ = false;
  std::thread heart_;
};

}  // namespace weft::launch
