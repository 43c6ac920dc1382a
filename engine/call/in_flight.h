// How many calls, and how many bytes of them, go from one worker to one other at a time: those that
// are unanswered where they are made, and those that run or wait to where they come. One more fails
// with Busy on either side. It is not left unread: behind it may come what those before it wait
// for, a nested call or the news that a reference is known, and then nothing would go on.
//
// Calls that have too many bytes wait where the program issues them, before they have a place on
// the connection. Only the program's own threads wait: what serves calls, and what brings results,
// may be what ends the calls in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <weft/engine/call/types.h>

namespace weft::rpc {

// Weft's own messages are counted apart, so that they get through where calls have taken all slots.
// They are short, and only a foreign program has so many unanswered.
constexpr int kMostOwnInFlight = 65536;
constexpr bool is_users(MessageKind kind) {
  return kind == MessageKind::Call || kind == MessageKind::Create || kind == MessageKind::Fetch;
}

using InFlight = std::atomic<int>;

// One call among them, from when it is made until it is answered.
class Slot {
 public:
  Slot() = default;  // none
  // None where `most` are taken.
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
    std::atomic<bool> has_come{false};
  };
  // Wakes the thread that waits for this turn. Is called without locks, and the turn may be over by
  // then: its address alone counts.
  using Wake = std::function<void(const void* turn)>;

  // 0: without limit.
  BytesInFlight(std::uint64_t most, Wake wake) : most_(most), wake_(std::move(wake)) {}

  // Takes the bytes where they fit; a call that is larger than all that is allowed fits where no
  // other is in flight.
  bool take(std::uint64_t bytes);
  void take_anyway(std::uint64_t bytes);
  // Takes the bytes when it is this call's turn, which shows in `turn`; it lives until it has come
  // or been given up.
  void wait(Turn& turn);
  // Returns false where it had come already.
  bool give_up(Turn& turn);
  void give_back(std::uint64_t bytes);
  std::uint64_t taken() const;

 private:
  // Takes the bytes if they fit, and returns whether they did.
  bool take_room(std::uint64_t bytes);
  std::vector<const void*> let_in();  // requires mutex_
  void wake(const std::vector<const void*>& turns) const;

  const std::uint64_t most_;
  const Wake wake_;
  std::mutex mutex_;
  // Calls take and give back their bytes without the mutex. One that waits is counted before its
  // thread looks for room, and one that gives bytes back checks afterwards whether any call waits:
  // one of the two sees the other.
  std::atomic<std::uint64_t> taken_{0};
  std::atomic<std::size_t> waiting_{0};  // the number of turns_
  std::list<Turn*> turns_;
};

// What one call has taken of them.
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

// Of the calls that one worker serves, by caller: over all its connections, for what came by one
// that has ended may run yet. Usable from every thread.
class Callers {
 public:
  struct Counts {
    InFlight calls{0};
    InFlight own{0};
  };
  std::shared_ptr<Counts> of(int rank) {
    std::lock_guard lock(mutex_);
    auto& known = counts_[rank];
    auto counts = known.lock();
    if (!counts) known = counts = std::make_shared<Counts>();
    return counts;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::weak_ptr<Counts>> counts_;
};

}  // namespace weft::rpc
