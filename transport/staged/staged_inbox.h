// SPDX-License-Identifier: Apache-2.0
// The receiving half of a staged connection. It shows messages from the connection below to the
// handler and moves the payloads to the destinations that accept() names. Payloads for device
// memory land in a pinned chunk first, and a stream copies them on.
//
// accept(), refuse() and let_go() are thread-safe; everything else runs on the loop.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/transport/connection.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::staged {

class Inbox : public std::enable_shared_from_this<Inbox> {
 public:
  using Arrived = std::function<void(const Arrival&)>;

  // The caller owns `limits`.
  Inbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage, const Capabilities& limits,
        const std::shared_ptr<EventLoop>& loop);

  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // Takes a message that the connection below shows. Returns in words why the peer cannot be a Weft
  // process, if so.
  std::optional<std::string> take(const Arrival& below, const Arrived& arrived);
  // Makes accept() fail with `why` from now on. Returns false if it already fails.
  bool refuse(const Error& why);
  // Fails the message that was accepted and has not arrived whole. Call it after refuse().
  void end() noexcept;
  // Gives up the connection below. Thread-safe; call it after refuse(). (That connection shares the
  // loop, which must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  std::optional<Error> why_refused(std::span<const Slice> destinations) const WEFT_REQUIRES(mutex_);
  // Called without mutex_, because it calls drivers. The connection below stays alive meanwhile: it
  // is released only with the last user of this one.
  Result<Reached> reach(std::span<const Slice> destinations);
  // Returns the loop without sharing it (a callback that held the last reference would destroy it
  // from inside); null if it has ended. The caller holds the loop or runs inside its turn.
  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "accept from " + peer_; }
  Chunks::Lease take_chunk();

  // A message or part that the connection below was told to receive, and the copies that follow.
  struct Taken {
    Op op;
    std::vector<CopyStream::Copy> copies;
    std::vector<Slice> direct;  // destinations on GPUs that the connection below writes
    Pin held;
    std::shared_ptr<Landing> landing;
    Fence ready;
    bool is_last = false;
  };
  bool needs_chunk(std::size_t index, std::uint64_t bytes) const WEFT_REQUIRES(mutex_);
  // Pass the result of the next two to when_landed() after releasing mutex_.
  std::optional<Taken> take_whole() WEFT_REQUIRES(mutex_);
  std::optional<Taken> take_part() WEFT_REQUIRES(mutex_);
  std::optional<std::string> why_wrong(std::uint64_t bytes) WEFT_REQUIRES(mutex_);
  void forget() WEFT_REQUIRES(mutex_);

  void when_landed(Taken taken);
  void land(Taken taken);
  void end_below(const Error& why);
  // Called when a chunk has been returned.
  void go_on();

  const std::string peer_;
  const std::shared_ptr<Stage> stage_;
  const Capabilities& limits_;
  const std::size_t direct_bytes_;  // the capability of the connection below
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;
  const std::shared_ptr<Chunks> chunks_;
  CopyStreams streams_;

  // State of a message.
  enum class Stand { None, Shown, Accepted };

  Mutex mutex_;
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> below_ WEFT_GUARDED_BY(mutex_);  // not used once failure_ is set
  Stand stand_ WEFT_GUARDED_BY(mutex_) = Stand::None;
  Kind kind_ WEFT_GUARDED_BY(mutex_) = Kind::Whole;
  std::vector<std::uint64_t> sizes_ WEFT_GUARDED_BY(mutex_);  // unchanged until the next message
  std::vector<std::uint64_t> decoded_sizes_ WEFT_GUARDED_BY(mutex_);  // scratch
  std::uint64_t total_ WEFT_GUARDED_BY(mutex_) = 0;
  std::vector<Slice> destinations_ WEFT_GUARDED_BY(mutex_);
  Reached reached_ WEFT_GUARDED_BY(mutex_);  // parallel to destinations_; its pins are part of pin_
  Pin pin_ WEFT_GUARDED_BY(mutex_);
  Fence ready_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Landing> landing_ WEFT_GUARDED_BY(mutex_);
  std::size_t index_ WEFT_GUARDED_BY(mutex_) = 0;     // of the payload that arrives next
  std::uint64_t offset_ WEFT_GUARDED_BY(mutex_) = 0;  // in that payload
  std::uint64_t come_ WEFT_GUARDED_BY(mutex_) = 0;    // bytes that arrived, of all payloads
  // Bytes of the chunk that was shown and not taken.
  std::uint64_t waiting_ WEFT_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::transport::staged
