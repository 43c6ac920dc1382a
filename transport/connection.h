// One ordered lane to one peer. A message is a small header and any number of payload slices.
// Receiving has two phases: the receiver sees the header and the payloads' sizes first, names
// destinations, and the payloads land there; until it has, the rest of the lane waits, and so does
// the sender once what lies between them is full. So nothing queues without bound.
//
// Messages arrive whole, in the order of the sends, or not at all. A lane that fails stays failed:
// everything pending ends with the error, in order, and so does every later call. What send() has
// reported done is delivered even if the sender closes right after, as long as the receiver goes on
// receiving.
//
// All functions may be called from every thread and never block. Handlers run on the loop, never
// inside a call of this class, and may drop the last reference to the connection.
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

// What a lane can do. Limits hold for both directions.
struct Capabilities {
  bool device_memory = false;  // payloads and destinations may lie on a GPU
  bool one_sided = false;      // put() into a peer's MemoryRegion; see one_sided()
  std::size_t direct_bytes =
      0;  // the least of a GPU's memory that the network moves itself; see reach(); 0: none
  std::size_t inline_bytes =
      0;  // messages up to this (header and payloads) are copied by send(), where there is room
  std::size_t max_header = 64 << 10;                   // bytes
  std::size_t max_payloads = 4096;                     // slices of one message
  std::uint64_t max_message = std::uint64_t{1} << 40;  // bytes of all payloads of one message
  std::size_t max_queued = 65536;                      // sends that wait; one more fails with Busy
};

// The next message of the lane, seen by its receiver.
struct Arrival {
  std::span<const std::byte> header;     // valid until the handler returns
  std::span<const std::uint64_t> sizes;  // bytes of each payload; valid until the handler returns
  // The payloads, one behind the other, where they have come already and lie in memory of the
  // transport; empty where not. Valid until the message is accepted: who only reads them accepts
  // with no destinations afterwards and saves a copy.
  std::span<const std::byte> in_place;
};

class Connection {
 public:
  struct Handlers {
    // The next message. Inside, or at any later time, accept() must be called once; before it is,
    // nothing more arrives.
    std::function<void(const Arrival&)> arrived;
    // Once, after the last message that came whole: nothing more will. Says why: PeerLost,
    // Cancelled (close()), …
    std::function<void(const Error&)> closed;
    // `arrived` works on payloads where they lie. A lane shows messages that it can keep in place
    // only once all of one is there, then; else it names long ones early, and they are moved on
    // while more of them comes.
    bool in_place = false;
  };

  virtual ~Connection() = default;
  // "shm", "tcp", …
  virtual std::string_view transport() const = 0;
  // Who is at the other end, for messages: "127.0.0.1:4711".
  virtual std::string peer() const = 0;
  virtual const Capabilities& capabilities() const = 0;

  // Starts receiving; messages that came before wait for it. Once only.
  virtual void receive(Handlers handlers) = 0;

  // Sends the header, which is copied, and the payloads, which must not change until the Op is
  // done: then the memory may be used again. `ready` says when they may be read; later sends wait
  // behind it. Errors: Caller (limits), Busy (queue full).
  virtual Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
                  Fence ready) noexcept = 0;

  // Names the destinations of the message that arrived last: one slice per payload, of its size; or
  // none at all, and the payloads are thrown away. `ready` says when they may be overwritten. The
  // Op is done when the payloads are there.
  virtual Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept = 0;

  // Writes into the peer's memory that it takes no part in. Null where capabilities() say that
  // there are none.
  virtual OneSided* one_sided() { return nullptr; }

  // Where direct_bytes says so: lets the network read and write this memory of a GPU itself
  // (GPUDirect RDMA). While the pin lives, parts of it of at least direct_bytes may be payloads and
  // destinations of a lane of host memory. Registers the allocation that the memory is of, the
  // first time: about a millisecond. Errors: Unsupported and others, with the reason, which is
  // logged once; not so where the lane has ended or the GPU is lost.
  virtual Result<Pin> reach(const Slice& /*memory*/, cuda::Device& /*gpu*/) noexcept {
    return Error(Blame::Unsupported,
                 "a lane of " + std::string(transport()) + " moves host memory only");
  }

  // Ends the lane: what is pending here fails with `why`, the peer hears of it after what was sent.
  // Idempotent.
  virtual void close(const Error& why) noexcept = 0;
};

}  // namespace weft::transport
