// SPDX-License-Identifier: Apache-2.0
// Limits on the calls in flight from one worker to another, and on their bytes
// (Options::calls_in_flight and bytes_in_flight, types.h, are the numbers). A call is in flight
// while it is unanswered where it was made, and while it runs or waits where it has arrived. One
// call too many fails with Busy on either side (outgoing_calls.cc refuses it at the caller,
// inbound.cc at the callee). It is not left unread, because earlier calls may wait for a message
// behind it, such as a nested call or the news that a reference is known, and then nothing would go
// on.
//
// Calls with too many bytes wait where the program issues them, before they have a place on the
// connection. Only the program's own threads wait: a thread that serves calls or brings results may
// be the one that ends the calls in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/call/types.h>

namespace weft::call {

// Weft's own messages are counted apart, so that they get through when calls have taken all slots.
// They are short, and only a foreign program has so many unanswered.
constexpr int kMostOwnInFlight = 65536;
constexpr bool is_users(MessageKind kind) {
  return kind == MessageKind::Call || kind == MessageKind::Create || kind == MessageKind::Fetch;
}

using InFlight = std::atomic<int>;

// The place of one call among them, from when it is made until it is answered.
class Slot {
 public:
  Slot() = default;  // none
  // Returns an empty slot if `most` are taken.
  static Slot take(std::shared_ptr<InFlight> of, int most) noexcept {
    if (of->fetch_add(1, std::memory_order_relaxed) < most) return Slot(std::move(of));
    of->fetch_sub(1, std::memory_order_relaxed);
    return Slot();
  }
  ~Slot() {
    if (of_) of_->fetch_sub(1, std::memory_order_relaxed);
  }
  Slot(Slot&& other) noexcept = default;
  Slot& operator=(Slot&& other) noexcept {
    of_.swap(other.of_);
    return *this;
  }
  explicit operator bool() const { return of_ != nullptr; }

 private:
  explicit Slot(std::shared_ptr<InFlight> of) : of_(std::move(of)) {}
  std::shared_ptr<InFlight> of_;
};

// The bytes of the calls from one worker to one other. Usable from every thread.
class BytesInFlight {
 public:
  // A call that waits for its turn, in the order of arrival.
  struct Turn {
    std::uint64_t bytes = 0;
    std::atomic<bool> has_room{false};
  };
  // Wakes the thread that waits for this turn. Called without locks. The turn may be over by then,
  // so only its address may be used.
  using Wake = std::function<void(const void* turn)>;

  // `most` is 0 for no limit.
  BytesInFlight(std::uint64_t most, Wake wake) : most_(most), wake_(std::move(wake)) {}

  // Takes the bytes if they fit. A call that is larger than the limit fits if no other call is in
  // flight.
  bool take(std::uint64_t bytes);
  void take_anyway(std::uint64_t bytes);
  // Queues the call. Its bytes are taken when there is room, as `turn` then shows. `turn` must
  // live until it has room or has been given up.
  void wait(Turn& turn);
  // False if the turn has room already.
  bool give_up(Turn& turn);
  void give_back(std::uint64_t bytes);
  std::uint64_t taken() const;

 private:
  // Takes the bytes if they fit, and returns whether they did.
  bool take_room(std::uint64_t bytes);
  std::vector<const void*> let_in() WEFT_REQUIRES(mutex_);
  void wake(const std::vector<const void*>& turns) const;

  const std::uint64_t most_;
  const Wake wake_;
  Mutex mutex_;
  // Calls take and give back their bytes without the mutex. A call that waits is counted before its
  // thread looks for room, and a call that gives bytes back checks afterwards whether any call
  // waits. So one of the two sees the other.
  std::atomic<std::uint64_t> taken_{0};
  std::atomic<std::size_t> waiting_{0};  // the number of turns_
  std::list<Turn*> turns_ WEFT_GUARDED_BY(mutex_);
};

// The bytes that one call has taken.
class HeldBytes {
 public:
  HeldBytes() = default;
  HeldBytes(std::shared_ptr<BytesInFlight> of, std::uint64_t bytes)
      : of_(std::move(of)), bytes_(bytes) {}
  ~HeldBytes() {
    if (of_) of_->give_back(bytes_);
  }
  HeldBytes(HeldBytes&& other) noexcept = default;
  HeldBytes& operator=(HeldBytes&& other) noexcept {
    of_.swap(other.of_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

 private:
  std::shared_ptr<BytesInFlight> of_;
  std::uint64_t bytes_ = 0;
};

// Counts the incoming calls of one worker by caller, over all its connections, because a call may
// still run whose connection has ended. Usable from every thread.
class Callers {
 public:
  struct Counts {
    InFlight calls{0};
    InFlight own{0};
  };
  std::shared_ptr<Counts> of(int rank) {
    MutexLock lock(mutex_);
    auto& known = counts_[rank];
    auto counts = known.lock();
    if (!counts) known = counts = std::make_shared<Counts>();
    return counts;
  }

 private:
  Mutex mutex_;
  std::map<int, std::weak_ptr<Counts>> counts_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
