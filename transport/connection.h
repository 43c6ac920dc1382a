// SPDX-License-Identifier: Apache-2.0
// An ordered connection to one peer. A message is a small header and any number of payload slices.
// It is received in two phases: the receiver sees the header and the payloads' sizes, then names
// destinations, and the payloads are written there. Until it has named them the rest of the
// connection waits, and so does the sender once the buffers between them are full. So nothing
// queues without bound.
//
// Messages arrive whole and in the order in which they were sent, or not at all. A connection that
// fails stays failed: every pending operation ends with the error, in order, and so does every
// later call. A message whose send() was reported done is delivered even if the sender closes right
// afterwards, as long as the receiver goes on receiving.
//
// All functions are thread-safe and never block. Handlers run on the loop, never inside a call of
// this class, and may drop the last reference to the connection.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <weft/base/op.h>
#include <weft/base/slice.h>
#include <weft/transport/memory_region.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport {

// Features and limits of a connection. Limits apply to both directions.
struct Capabilities {
  bool device_memory = false;  // payloads and destinations may lie on a GPU
  bool one_sided = false;      // put() into a peer's MemoryRegion; see one_sided()
  // The smallest piece of GPU memory that the network moves itself, see reach(); 0: none.
  std::size_t direct_bytes = 0;
  // send() copies messages up to this size (header and payloads) if there is room.
  std::size_t inline_bytes = 0;
  std::size_t max_header = 64 << 10;                   // bytes
  std::size_t max_payloads = 4096;                     // slices of one message
  std::uint64_t max_message = std::uint64_t{1} << 40;  // bytes of all payloads of one message
  std::size_t max_queued = 65536;                      // pending sends; one more fails with Busy
};

// The next message of the connection, as its receiver sees it.
struct Arrival {
  std::span<const std::byte> header;     // valid until the handler returns
  std::span<const std::uint64_t> sizes;  // bytes of each payload; valid until the handler returns
  // The payloads, one behind the other, if they have already arrived and lie in the transport's
  // memory; else empty. Valid until the message is accepted. A receiver that only reads them
  // accepts with no destinations afterwards and saves a copy.
  std::span<const std::byte> in_place;
};

class Connection {
 public:
  struct Handlers {
    // Called for the next message. The handler, or any thread later, calls accept() once; nothing
    // more arrives before that.
    std::function<void(const Arrival&)> arrived;
    // Called once, after the last message that arrived whole, with the reason: PeerLost, Cancelled
    // (close()), …
    std::function<void(const Error&)> closed;
    // True if `arrived` works on payloads where they lie. The connection then shows a message that
    // it can keep in place only when all of it has arrived. Otherwise it shows long messages early,
    // and moves their bytes on while more arrive.
    bool in_place = false;
  };

  virtual ~Connection() = default;
  // "shm", "tcp", …
  virtual std::string_view transport() const = 0;
  // Names the other end, for messages: "127.0.0.1:4711".
  virtual std::string peer() const = 0;
  virtual const Capabilities& capabilities() const = 0;

  // Starts receiving; messages that arrived earlier have waited for it. Must be called only once.
  virtual void receive(Handlers handlers) = 0;

  // Sends the header, which is copied, and the payloads, which must not change until the Op is
  // done; then their memory may be reused. `ready` says when the payloads may be read; later sends
  // wait behind it. Errors: Caller (limits), Busy (queue full).
  virtual Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
                  Fence ready) noexcept = 0;

  // Names the destinations of the message that arrived last: one slice per payload, of the same
  // size, or none at all to discard the payloads. `ready` says when the destinations may be
  // overwritten. The Op is done when the payloads are there.
  virtual Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept = 0;

  // One-sided writes into the peer's memory. Null if capabilities().one_sided is false.
  virtual OneSided* one_sided() { return nullptr; }

  // Lets the network read and write this GPU memory itself (GPUDirect RDMA), if
  // capabilities().direct_bytes is not 0. While the pin lives, parts of the memory of at least
  // direct_bytes may be payloads and destinations, although the connection otherwise moves host
  // memory only. The first call for an allocation registers all of it, which takes about a
  // millisecond. Errors: Unsupported and others, with the reason, which is logged once, unless the
  // connection has ended or the GPU is lost.
  virtual Result<Pin> reach(const Slice& /*memory*/, cuda::Device& /*gpu*/) noexcept {
    return Error(Blame::Unsupported,
                 "a connection of " + std::string(transport()) + " moves host memory only");
  }

  // Ends the connection: pending operations on this side fail with `why`; the peer learns of it
  // after everything that was sent. Idempotent.
  virtual void close(const Error& why) noexcept = 0;
  // As close(), for a peer that has not proved who it is: does not wait until the peer has ended
  // its side. So strangers that stay cannot use up this process's descriptors.
  virtual void turn_away(const Error& why) noexcept { close(why); }
};

}  // namespace weft::transport
