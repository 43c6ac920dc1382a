// SPDX-License-Identifier: Apache-2.0
// One weft-run's part in the rendezvous of its job: joins the rounds, reports the outcome of its
// ranks, learns the outcome of the other nodes' ranks, and notices lost nodes. A thread of its own
// sends heartbeats; only one thread may call the functions.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/base/patience.h>
#include <weft/engine/launch/rendezvous_state.h>
#include <weft/engine/launch/shared_store.h>

namespace weft::launch {

class Rendezvous {
 public:
  // The defaults are torchrun's.
  struct Settings {
    RendezvousLimits limits;
    std::chrono::milliseconds join_timeout = std::chrono::seconds(600);  // time limit of join()
    // How long the first round waits for more than the least number of nodes.
    std::chrono::milliseconds last_call_timeout = std::chrono::seconds(30);
    std::chrono::milliseconds keep_alive_interval = std::chrono::seconds(5);
    int keep_alive_max_attempt = 3;  // a node is lost after so many intervals without a heartbeat
    std::chrono::milliseconds monitor_interval = std::chrono::milliseconds(100);
    // When a node that waits for others repeats that it waits.
    WaitReports wait_reports = default_wait_reports();
  };

  // This node's place in a round that runs.
  struct Assignment {
    int round = 0;
    int node_rank = 0;
    int nodes = 1;
    int first_rank = 0;
    int world_size = 1;
    std::string master_address;
    int master_port = 0;
    int restarts = 0;
    std::string cause;  // why the round began; "" for the first
  };

  // Throws Busy if the thread for the heartbeats cannot be started.
  Rendezvous(std::shared_ptr<SharedStore> store, Settings settings, Node self);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Blocks until a round with this node runs; `port` is a free port of this node for that round.
  // Meanwhile, asks `goes_on` whether to continue, and tells `tell` what it waits for. Returns
  // nothing if `goes_on` returns false, or if the job has ended: see end(). Throws Timeout if too
  // few nodes join, Caller if the job has other limits than this node, PeerLost if the store is
  // lost.
  std::optional<Assignment> join(int port, const std::function<bool()>& goes_on,
                                 const std::function<void(const std::string&)>& tell);

  enum class News { None, NextRound, End };
  // Whether the round goes on. Asks the store at most once per monitor interval.
  News look();
  // Reports that all ranks of this node have ended well. The job has ended well when those of all
  // nodes have: look() tells.
  void finished();
  // Reports that a rank of this node has failed. Returns whether another round follows.
  bool failed(const std::string& why, int code);
  const std::optional<JobEnd>& end() const { return end_; }
  // A node without a heartbeat for this long is lost.
  std::chrono::milliseconds patience() const {
    return settings_.keep_alive_interval * settings_.keep_alive_max_attempt;
  }
  // Leaves the job; the other nodes continue without this one if their limits allow it. The node
  // that hosts the store waits for up to patience() until all have learned of the job's end.
  void leave(const std::function<bool()>& goes_on) noexcept;

 private:
  using Clock = Deadline::Clock;
  struct Pulse {
    std::int64_t count = 0;
    Clock::time_point since;  // when `count` last changed
  };

  // Changes the state in the store and returns the new state. Retries with a growing backoff if
  // another node has changed it meanwhile. Throws Timeout if that happens until the deadline.
  RendezvousState update(Deadline deadline, const std::function<void(RendezvousState&)>& change);
  RendezvousState update(const std::function<void(RendezvousState&)>& change) {
    return update(Deadline::in(settings_.join_timeout), change);
  }
  // The ids of the watched nodes whose heartbeats have stopped.
  std::vector<std::string> lost(const RendezvousState& state);
  Assignment place_of(const RendezvousState& state) const;
  void beat();

  const std::shared_ptr<SharedStore> store_;
  const Settings settings_;
  Node self_;
  int round_ = -1;
  std::optional<JobEnd> end_;
  std::map<std::string, Pulse> pulses_;
  Clock::time_point next_look_;
  Clock::time_point last_watch_;

  Mutex mutex_;
  std::condition_variable wakes_;
  bool stops_ WEFT_GUARDED_BY(mutex_) = false;
  std::thread heart_;
};

}  // namespace weft::launch
