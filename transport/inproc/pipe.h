// SPDX-License-Identifier: Apache-2.0
// One direction between two engines of a process: a bounded ring of bytes, with the faults that a
// test injects. Thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/transport/byte_stream.h>

namespace weft::transport::inproc {

// Reports a change by posting to a loop, where the function runs unless stop() was called by then.
// The loop must live until stop().
class Notice {
 public:
  Notice(EventLoop& loop, std::function<void()> call);
  void post() const;
  // Runs the function at that time instead, while the registration lives.
  EventLoop::Registration post_at(Deadline time) const;
  void stop() noexcept;

 private:
  struct State {
    Mutex mutex;  // no post() once stop() has returned
    EventLoop* loop WEFT_GUARDED_BY(mutex) = nullptr;
    std::function<void()> call;  // called on the loop; destroyed there, or with the last post
  };
  std::shared_ptr<State> state_;
};

class Pipe {
 public:
  using Bytes = ByteStream::Bytes;
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  explicit Pipe(std::size_t capacity) : ring_(capacity), window_(capacity) {}

  // The writer's side. `notice` reports room after a write() that took less than it was given.
  std::size_t write(std::span<const Bytes> pieces);
  void finish(const Error& why);  // the reader still reads everything that was written
  void on_room(std::optional<Notice> notice);
  std::optional<Error> deaf() const;

  // The reader's side, as in ByteStream. `notice` reports bytes, or the end, after a call that
  // found less than wanted.
  Bytes peek(std::size_t wanted);
  void consume(std::size_t bytes);
  std::size_t read(std::span<std::byte> to);
  std::size_t window() const;
  std::optional<Error> end() const;
  void on_bytes(std::optional<Notice> notice);
  void stop_reading(const Error& why);  // write() takes nothing from now on

  // Faults. Positions count the bytes of this direction from 0. See faults.h.
  void hold_at(std::uint64_t position);
  void cut_at(std::uint64_t position, const Error& why);
  void corrupt(std::uint64_t position);
  void move_at_most(std::size_t bytes);
  void slow_down(std::chrono::nanoseconds delay, double bytes_per_second);
  std::uint64_t written() const;

 private:
  std::uint64_t visible() const WEFT_REQUIRES(mutex_) {
    return std::min({arrived(), held_at_, cut_at_});
  }
  std::uint64_t arrived() const WEFT_REQUIRES(mutex_);
  void travel(std::uint64_t from) WEFT_REQUIRES(mutex_);
  void reader_waits() WEFT_REQUIRES(mutex_);
  void tell_of_arrival() WEFT_REQUIRES(mutex_);
  void put(Bytes bytes) WEFT_REQUIRES(mutex_);
  void copy_from_ring(std::span<std::byte> to) const WEFT_REQUIRES(mutex_);
  void tell_reader() WEFT_REQUIRES(mutex_);
  void tell_of_room() WEFT_REQUIRES(mutex_);
  void tell_writer() WEFT_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<std::byte> ring_ WEFT_GUARDED_BY(mutex_);
  // Shows bytes that wrap around the ring's end in one piece.
  std::vector<std::byte> window_ WEFT_GUARDED_BY(mutex_);
  // Bytes read (head_) and written (tail_) since the beginning.
  std::uint64_t head_ WEFT_GUARDED_BY(mutex_) = 0;
  std::uint64_t tail_ WEFT_GUARDED_BY(mutex_) = 0;
  bool reader_waits_ WEFT_GUARDED_BY(mutex_) = true;
  bool writer_waits_ WEFT_GUARDED_BY(mutex_) = false;
  std::optional<Notice> reader_ WEFT_GUARDED_BY(mutex_);
  std::optional<Notice> writer_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> finished_ WEFT_GUARDED_BY(mutex_);  // why the writer ended
  std::optional<Error> deaf_ WEFT_GUARDED_BY(mutex_);      // why the reader ended

  std::uint64_t held_at_ WEFT_GUARDED_BY(mutex_) = kNever;
  std::uint64_t cut_at_ WEFT_GUARDED_BY(mutex_) = kNever;
  std::optional<Error> cut_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> corrupted_ WEFT_GUARDED_BY(mutex_);
  std::size_t at_most_ WEFT_GUARDED_BY(mutex_) = std::numeric_limits<std::size_t>::max();

  // Bytes that travel over a slow link, up to position `end`.
  struct Travelling {
    std::uint64_t end = 0;
    Deadline::Clock::time_point comes;
  };
  std::chrono::nanoseconds delay_ WEFT_GUARDED_BY(mutex_){0};
  double bytes_per_second_ WEFT_GUARDED_BY(mutex_) = 0;  // 0: no limit
  // When the link has sent everything it was given.
  Deadline::Clock::time_point sent_ WEFT_GUARDED_BY(mutex_);
  mutable std::deque<Travelling> travelling_ WEFT_GUARDED_BY(mutex_);
  // The position up to which bytes have arrived, if others travel.
  mutable std::uint64_t come_ WEFT_GUARDED_BY(mutex_) = 0;
  // Reports the next bytes to the reader, at arrival_at_.
  EventLoop::Registration arrival_ WEFT_GUARDED_BY(mutex_);
  Deadline::Clock::time_point arrival_at_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::inproc
