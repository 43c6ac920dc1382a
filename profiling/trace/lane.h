// SPDX-License-Identifier: Apache-2.0
// One thread's events for the timeline, until the timeline's thread takes them: a chain of blocks
// with one writer and one reader, without locks. Internal to profiling/trace.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <weft/profiling/trace/timeline_data.h>

namespace weft::trace::timeline {

struct Event {
  enum class What : std::uint8_t { Push, Pop, Mark, Begin, End, Leave, Arrive, ArriveFrom, Lost };
  What what = What::Mark;
  Kind kind = Kind::Collective;
  Layer layer = Layer::User;
  std::uint8_t dims = 0;
  std::int64_t time = 0;
  const char* text = "";
  const char* called_by = "";
  std::uint64_t bytes = 0;
  int rank = -1;
  int peer = -1;
  int tag = 0;
  std::uint64_t ticket = 0;  // an operation's ticket, or an arrow's number
  std::uint64_t sequence = 0;
  Member member;
  const char* dtype = "";
  std::array<std::int64_t, kMostDims> shape{};
  std::unique_ptr<const std::string> error;  // the text, if the operation failed
};

class Lane {
 public:
  explicit Lane(int number, std::string name)
      : number_(number),
        name_(std::move(name)),
        write_(std::make_unique<Block>().release()),
        read_(write_) {}
  ~Lane() {
    while (read_ != nullptr) delete std::exchange(read_, read_->next.load());
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  int number() const { return number_; }
  const std::string& name() const { return name_; }

  // Called by the thread. Returns false and drops the event if the reader is too far behind. Before
  // the next event with room, adds a Lost event with the time of the first dropped one.
  bool add(Event event) {
    if (waiting_.load(std::memory_order_relaxed) >= kMost) {
      if (lost_since_ == 0) lost_since_ = event.time;
      return false;
    }
    tell_lost();
    put(std::move(event));
    return true;
  }
  void close() noexcept {
    try {
      tell_lost();
    } catch (const std::bad_alloc&) {
      // the timeline does not show then where events are missing
    }
    closed_.store(true, std::memory_order_release);
  }

  // Called by the timeline's thread.
  template <class Take>
  void take(const Take& each) {
    for (;;) {
      const std::size_t filled = read_->filled.load(std::memory_order_acquire);
      for (; taken_ < filled; ++taken_) {
        each(read_->events[taken_]);
        waiting_.fetch_sub(1, std::memory_order_relaxed);
      }
      if (taken_ < kBlock) return;
      delete std::exchange(read_, read_->next.load(std::memory_order_acquire));
      taken_ = 0;
    }
  }
  // Whether the thread has ended. Its events may still wait to be taken.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  void put(Event event) {
    const std::size_t at = write_->filled.load(std::memory_order_relaxed);
    write_->events[at] = std::move(event);
    waiting_.fetch_add(1, std::memory_order_relaxed);
    Block* const block = write_;
    if (at + 1 == kBlock) {
      auto* const fresh = new Block();
      block->next.store(fresh, std::memory_order_release);
      write_ = fresh;
    }
    block->filled.store(at + 1, std::memory_order_release);
  }
  void tell_lost() {
    if (lost_since_ == 0) return;
    Event lost;
    lost.what = Event::What::Lost;
    lost.time = lost_since_;
    put(std::move(lost));
    lost_since_ = 0;
  }

  static constexpr std::size_t kBlock = 512;
  static constexpr std::size_t kMost = 1 << 17;
  struct Block {
    std::array<Event, kBlock> events;
    std::atomic<std::size_t> filled{0};
    std::atomic<Block*> next{nullptr};
  };
  const int number_;
  const std::string name_;
  std::atomic<bool> closed_{false};
  std::atomic<std::size_t> waiting_{0};
  std::int64_t lost_since_ = 0;  // used by the thread only
  Block* write_;
  Block* read_;
  std::size_t taken_ = 0;
};

}  // namespace weft::trace::timeline
