// The receiving half of a StreamConnection: finds the messages in the stream, shows each to the
// handler, and moves its payloads where accept() says. accept() is for every thread, the rest for
// the loop.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/op.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

class Inbox {
 public:
  using Bytes = ByteStream::Bytes;
  using Arrived = std::function<void(const Arrival&)>;
  // Has pump() called on the loop, in a later turn, once the fence has passed.
  using Again = std::function<void(const Fence&)>;
  // The same, as EventLoop::post_soon says.
  using Soon = std::function<void()>;

  Inbox(ByteStream& stream, const Capabilities& limits, std::string who,
        std::weak_ptr<EventLoop> loop, Again again, Soon soon);

  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // See Connection::Handlers::in_place. Before the first pump() that has `arrived`.
  void work_in_place() { whole_ = stream_.shown_whole(); }
  // From now on accept() fails with this, and no message is shown. For every thread.
  void refuse(const Error& why);

  // Reads on as far as that goes. Null: nobody receives yet. Returns why the lane ends, when it
  // does.
  std::optional<Error> pump(const Arrived* arrived);
  // The memory of the message that was accepted stays for good.
  void keep_pins() noexcept;
  // Fails the message that was accepted and has not come whole.
  void end() noexcept;
  // Throws away what comes; returns whether the stream has ended.
  bool drain() noexcept;

 private:
  // What the loop does next.
  enum class Phase { Preamble, Front, Shown, Payload };
  // Where a message stands between the handler and the thread that accepts it.
  enum class Offer { None, Shown, Taken, Copied };
  enum class Step { On, NeedBytes, Wait, End };

  // Throws away the zeros between two messages; false where they have not come.
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
  Step lose(const std::string& text);
  void let_go_of_message();
  // The first `wanted` bytes of the next message, or more; empty when they have not come.
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
  const std::size_t unit_;  // of the stream
  std::size_t whole_;       // bytes of a message that is shown when all of it is there

  // The loop's.
  Phase phase_ = Phase::Preamble;
  std::size_t padding_ = 0;  // zeros that come before the next message
  std::vector<std::byte>
      gathered_;  // a message's front where the stream cannot show it in one piece
  std::size_t gathered_bytes_ = 0;
  std::size_t held_ = 0;  // bytes that peek() shows and the message needs until it is accepted
  std::size_t turn_bytes_ = 0;
  std::size_t index_ = 0;     // of the destination that is being filled
  std::uint64_t offset_ = 0;  // in it, or in what is thrown away
  bool awaited_ = false;
  std::optional<Error> why_;

  std::mutex mutex_;  // of accepting, and of failure_
  std::optional<Error> failure_;
  std::atomic<bool> fails_{false};  // whether there is one
  // Who may touch what follows: at first the loop, while it is Shown whoever accepts, with the
  // mutex, then the loop again. (A message whose handler accepts it takes the mutex once so; three
  // times would be half of what receiving costs.)
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
