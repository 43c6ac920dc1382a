// SPDX-License-Identifier: Apache-2.0
// Announcements: workers that come and go tell each other, through the job's store, that one has
// joined, left or been lost. Each announcement is a key of its own, numbered from 1. A follower
// blocks until the next key exists, so nobody polls. A worker's record (records.h) is written
// before its announcement; where the two differ, the record counts.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <weft/base/error.h>
#include <weft/engine/call/records.h>
#include <weft/transport/bootstrap.h>

namespace weft::call {

struct Announcement {
  int standing = 0;  // the worker's Standing from now on
  WorkerInfo worker;
  Generation generation = 0;
  std::string why;  // why the worker is lost; else empty
  WEFT_FIELDS(standing, worker, generation, why)
};

// Passes on errors of the store.
void announce(transport::Bootstrap& store, const Announcement& announcement);
// The number of announcements so far. It may lag a little while others announce.
long announced(transport::Bootstrap& store);

// A thread that reads announcements in order, for as long as this object lives.
class Follower {
 public:
  using Heard = std::function<void(const Announcement&)>;
  // Begins after the first `from` announcements. Calls `heard` for each announcement, and `lost`
  // once if the store has failed, after which nothing more is heard; both on its thread. Throws
  // Busy if no thread can be started.
  Follower(std::shared_ptr<transport::Bootstrap> store, long from, Heard heard,
           std::function<void(const Error&)> lost);
  // Stops the callbacks. The thread itself ends at the next announcement; this worker makes one as
  // it leaves.
  void stop() noexcept;
  // Waits for the thread, unless called on it.
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

 private:
  struct State;
  static void follow(State& state);
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace weft::call
