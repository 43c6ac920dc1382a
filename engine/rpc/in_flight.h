// How many calls go from one worker to one other at a time: those that are unanswered where they are made, and those that
// run or wait to where they come. One more fails with Busy on either side. It is not left unread: behind it may come what
// those before it wait for, a nested call or the news that a reference is known, and then nothing would go on.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <weft/engine/rpc/types.h>

namespace weft::rpc {

// Weft's own messages are counted apart, so that they get through where calls have taken all slots. They are short, and
// only a foreign program has so many unanswered.
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

// Of the calls that one worker serves, by caller: over all its connections, for what came by one that has ended may run
// yet. Usable from every thread.
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
