// What workers that come and go tell each other through the job's store: one has joined, left or
// been lost. Each announcement is a key of its own, numbered from 1; whoever follows them blocks
// until the next is there, so nobody polls. The workers' records (records.h) stand in the store
// before an announcement does, and have the last word.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <weft/base/error.h>
#include <weft/engine/call/records.h>
#include <weft/transport/bootstrap.h>

namespace weft::rpc {

struct Announcement {
  int standing = 0;  // that the worker has from now on
  WorkerInfo worker;
  Generation generation = 0;
  std::string why;  // of one that is lost
  WEFT_FIELDS(standing, worker, generation, why)
};

// Throws what the store throws.
void announce(transport::Bootstrap& store, const Announcement& announcement);
// How many there have been; a few less where others announce just now.
long announced(transport::Bootstrap& store);

// A thread that reads announcements one after the other, for as long as this object lives.
class Follower {
 public:
  using Heard = std::function<void(const Announcement&)>;
  // Begins behind the first `from` announcements. `heard` and `lost` are called on the thread;
  // `lost` once, where the store has failed, and nothing is heard any more. Throws Busy where no
  // thread can be started.
  Follower(std::shared_ptr<transport::Bootstrap> store, long from, Heard heard,
           std::function<void(const Error&)> lost);
  // Nothing is heard any more. The thread ends with the next announcement, which this worker makes
  // as it leaves.
  void stop() noexcept;
  // Waits for the thread.
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

 private:
  struct State;
  static void follow(State& state);
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace weft::rpc
