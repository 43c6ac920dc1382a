// SPDX-License-Identifier: Apache-2.0
// The receiving half of a StreamConnection: finds the messages in the stream, shows each to the
// handler, and moves its payloads to the destinations that accept() names. accept() and refuse()
// are thread-safe; everything else runs on the loop.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

class Inbox {
 public:
  using Bytes = ByteStream::Bytes;
  using Arrived = std::function<void(const Arrival&)>;
  // Calls pump() on the loop, in a later turn, once the fence has passed.
  using Again = std::function<void(const Fence&)>;
  // Calls pump() in a later turn, as EventLoop::post_soon does.
  using Soon = std::function<void()>;

  Inbox(ByteStream& stream, const Capabilities& limits, std::string who,
        std::weak_ptr<EventLoop> loop, Again again, Soon soon);

  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // See Connection::Handlers::in_place. Call it before the first pump() that has `arrived`.
  void work_in_place() { whole_ = stream_.shown_whole(); }
  // Makes accept() fail with `why` from now on; no message is shown any more. Thread-safe.
  void refuse(const Error& why);

  // Reads on as far as it can. `arrived` is null until the connection has a receiver. Returns why
  // the connection ends, when it does.
  std::optional<Error> pump(const Arrived* arrived);
  // Keeps the memory of the accepted message until the process ends.
  void keep_pins() noexcept;
  // Fails the message that was accepted and has not arrived whole.
  void end() noexcept;
  // Discards everything that arrives. Returns whether the stream has ended.
  bool drain() noexcept;

 private:
  // The part of the stream that the loop reads next.
  enum class Phase { Preamble, Front, Shown, Payload };
  // State of a message between the handler and the thread that accepts it.
  enum class Offer { None, Shown, Taken, Copied };
  enum class Step { On, NeedBytes, Wait, End };

  // Skips the zeros between two messages. False if they have not arrived.
  bool skip();
  Step read_preamble();
  Step read_front(const Arrived* arrived);
  Bytes find_in_place(Bytes& seen, std::size_t shown, std::uint64_t total);
  Step show(const Arrived& arrived, Bytes header, Bytes in_place, std::size_t shown,
            std::uint64_t total);
  Step take_up();
  Step read_payload();
  Step read_destinations();
  Step discard();
  Step lose(Blame blame, const std::string& text);
  void let_go_of_message();
  // Returns at least the first `wanted` bytes of the next message; empty if they have not arrived.
  Bytes front(std::size_t wanted);
  std::optional<Error> why_refused(std::span<const Slice> destinations) const;
  Op take(std::span<const Slice> destinations, Pin pin, Fence ready);
  Error lost(const Error& why) const;

  ByteStream& stream_;
  const Capabilities& limits_;
  const std::string who_;
  const std::weak_ptr<EventLoop> loop_;
  const Again again_;
  const Soon soon_;
  const std::size_t unit_;  // the stream's
  std::size_t whole_;       // a message up to this size is shown only when all of it has arrived

  // Used on the loop only.
  Phase phase_ = Phase::Preamble;
  std::size_t padding_ = 0;  // zeros before the next message
  // The front of a message that the stream cannot show in one piece.
  std::vector<std::byte> gathered_;
  std::size_t gathered_bytes_ = 0;
  // Bytes that peek() shows and that must stay until the message is accepted.
  std::size_t held_ = 0;
  std::size_t turn_bytes_ = 0;
  std::size_t index_ = 0;     // of the destination that is being filled
  std::uint64_t offset_ = 0;  // in that destination, or in the payloads that are discarded
  bool awaited_ = false;
  std::optional<Error> why_;

  Mutex mutex_;  // also held while a message is accepted
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  std::atomic<bool> fails_{false};  // whether failure_ is set
  // The members that follow belong to the loop, except while offer_ is Shown; then they belong to
  // the thread that accepts, which holds mutex_. (So a message that its handler accepts takes
  // mutex_ once; taking it three times would be half of the cost of receiving.)
  std::atomic<Offer> offer_{Offer::None};
  bool in_handler_ = false;
  std::vector<std::uint64_t> sizes_;
  std::uint64_t total_ = 0;
  Bytes in_place_;
  std::vector<Slice> destinations_;
  Fence ready_;
  std::optional<Completion> completion_;
};

}  // namespace weft::transport
