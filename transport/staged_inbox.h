// The receiving half of a staged connection: what comes from the lane below it shows to the
// handler, and moves the payloads where accept() says; those for device memory land in a pinned
// chunk first, and a stream copies them on.
//
// accept() is for every thread, the rest for the loop.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/transport/connection.h>
#include <weft/transport/staged_frame.h>
#include <weft/transport/staging.h>

namespace weft::transport::staged {

class Inbox : public std::enable_shared_from_this<Inbox> {
 public:
  using Arrived = std::function<void(const Arrival&)>;

  // `limits` stay the caller's.
  Inbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage, const Capabilities& limits,
        const std::shared_ptr<EventLoop>& loop);

  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // What the lane below shows. Returns in words why the peer is none of ours, if so.
  std::optional<std::string> take(const Arrival& below, const Arrived& arrived);
  // From now on accept() fails with this. False where it does already.
  bool refuse(const Error& why);
  // After refuse(): fails the message that was accepted and has not come whole.
  void end() noexcept;
  // After refuse(), for every thread: gives up the lane below. (It has a share in the loop, which
  // must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // Under the mutex.
  std::optional<Error> why_refused(std::span<const Slice> destinations) const;
  // Not under the mutex: drivers are asked. The lane below stays meanwhile, as it goes with the
  // last user of this one.
  Result<Reached> reach(std::span<const Slice> destinations);
  // The loop, without a share in it (a turn that held the last one would end it from inside); null
  // where it has ended. Whoever calls this holds it, or is inside its turn.
  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "accept from " + peer_; }
  Chunks::Lease take_chunk();

  // What the lane below was told to put somewhere, and what comes after that.
  struct Taken {
    Op op;
    std::vector<CopyStream::Copy> copies;
    std::vector<Slice> direct;  // destinations on GPUs that the lane below writes
    Pin held;
    std::shared_ptr<Landing> landing;
    Fence ready;
    bool is_last = false;
  };
  // Under the mutex. What they return goes to when_landed() outside it.
  bool needs_chunk(std::size_t index, std::uint64_t bytes) const;
  std::optional<Taken> take_whole();
  std::optional<Taken> take_part();
  std::optional<std::string> why_wrong(std::uint64_t bytes);
  void forget();

  void when_landed(Taken taken);
  void land(Taken taken);
  void end_below(const Error& why);
  // A chunk has come back.
  void go_on();

  const std::string peer_;
  const std::shared_ptr<Stage> stage_;
  const Capabilities& limits_;
  const std::size_t direct_bytes_;  // of the lane below
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;
  const std::shared_ptr<Chunks> chunks_;
  CopyStreams streams_;

  // Where a message stands.
  enum class Stand { None, Shown, Accepted };

  std::mutex mutex_;  // of what follows
  std::optional<Error> failure_;
  std::shared_ptr<Connection> below_;  // not touched once there is a failure
  Stand stand_ = Stand::None;
  Kind kind_ = Kind::Whole;
  std::vector<std::uint64_t> sizes_;          // steady until the next message
  std::vector<std::uint64_t> decoded_sizes_;  // scratch
  std::uint64_t total_ = 0;
  std::vector<Slice> destinations_;
  Reached reached_;  // of them; their pins are a part of pin_
  Pin pin_;
  Fence ready_;
  std::shared_ptr<Landing> landing_;
  std::size_t index_ = 0;      // of the payload that comes next
  std::uint64_t offset_ = 0;   // in it
  std::uint64_t come_ = 0;     // bytes, of all payloads
  std::uint64_t waiting_ = 0;  // bytes of the chunk that has been shown and not taken
};

}  // namespace weft::transport::staged
