// SPDX-License-Identifier: Apache-2.0
// A pair of non-blocking byte streams to one peer, which a transport implements and
// StreamConnection uses. TCP is one, a ring in shared memory is another; encryption could be
// layered over either. One thread may read while another writes; each direction is used by one
// thread at a time. No call blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/transport/memory_region.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport {

// One-sided writes of a stream that supports them. Like the stream's write(), called by one thread
// at a time.
class PlacedWrites {
 public:
  // As OneSided::expose, for host memory only.
  virtual Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) = 0;
  // Writes the piece, which lies within the region. Returns true when it is written. After false,
  // the caller waits for `writable` and repeats this call before any other put() or write(). An
  // error concerns this call alone.
  virtual Result<bool> put(const RegionKey& to, std::uint64_t offset,
                           std::span<const std::byte> piece) noexcept = 0;

 protected:
  ~PlacedWrites() = default;
};

class ByteStream {
 public:
  using Bytes = std::span<const std::byte>;

  virtual ~ByteStream() = default;
  // Names the other end, for messages.
  virtual std::string peer() const = 0;

  // Starts watching the stream on the loop. Calls `readable` when there may be something to read,
  // including the end of the stream, and `writable` when there may be room again after a write()
  // that took less than it was given. A stream whose connection is still being made takes no bytes
  // until it is made; if it cannot be made, the stream ends. After stop() has returned on the loop
  // neither function is called; if stop() is called on another thread, neither is called once the
  // turn that is running has ended.
  virtual void start(EventLoop& loop, std::function<void()> readable,
                     std::function<void()> writable) = 0;
  virtual void stop() noexcept = 0;

  // Takes as many bytes from the pieces, in order, as there is room for. Returns how many; 0 after
  // an error, see end().
  virtual std::size_t write(std::span<const Bytes> pieces) noexcept = 0;

  // Returns bytes that have arrived, as contiguous memory of the stream, valid until the next call
  // that reads. Empty if nothing has arrived. At least `wanted` bytes, if so many have arrived and
  // the stream can show them in one piece: see window(), and over several sockets the bytes may lie
  // apart.
  virtual Bytes peek(std::size_t wanted) noexcept = 0;
  // Releases the first `bytes` bytes that peek() showed.
  virtual void consume(std::size_t bytes) noexcept = 0;
  // Moves up to to.size() bytes, those that peek() would show first, to `to`. Returns how many; 0
  // if nothing has arrived.
  virtual std::size_t read(std::span<std::byte> to) noexcept = 0;
  // The most bytes that one peek() can show.
  virtual std::size_t window() const = 0;
  // A stream may move long pieces without a copy, and may still use their memory after a read() or
  // write() that took less than all of it; the next such call then begins with the same memory.
  // withdraw(), called on the loop, ends that use: afterwards the memory may be freed, and a
  // message that was in the middle of it is cut. Returns false if the device could not be stopped;
  // the memory must then stay.
  virtual bool withdraw(const Error& /*why*/) noexcept { return true; }
  // Messages up to this many bytes (at most window()) are shown only when they have arrived whole:
  // to a receiver that works on them in place that is worth more than starting early. A stream that
  // returns more than 0 knows its end() as soon as no more bytes will arrive.
  virtual std::size_t shown_whole() const { return 0; }
  // Every message begins at a multiple of this many bytes of the stream: a power of two, the same
  // on both ends. It is more than 1 if two messages in one cache line would cost more than the
  // padding, and if payloads are used in place.
  virtual std::size_t unit() const { return 1; }

  // The function behind Connection::reach(); null if the stream moves host memory only. It is
  // fetched once and then called on any thread, even after the stream is destroyed, because a call
  // takes long and the connection may end meanwhile. It does not throw.
  using Reach = std::function<Result<Pin>(const Slice& memory, cuda::Device& gpu)>;
  virtual Reach reach() const { return nullptr; }
  // True if this GPU memory may be passed to write() and read(): a pin from reach() that is still
  // alive covers it, and it is longer than window(). The stream then does not touch the bytes but
  // moves them without a copy, as it does long pieces of host memory. Thread-safe.
  virtual bool carries(const Slice& /*memory*/) const noexcept { return false; }

  // Null if the stream has no one-sided writes.
  virtual PlacedWrites* placed_writes() { return nullptr; }

  // Returns why nothing more will be read, once everything that arrived has been read. Writing may
  // end earlier, for the same reason.
  virtual std::optional<Error> end() const noexcept = 0;
  // Returns why nothing more can be written, if the stream knows that while there may still be
  // bytes to read: the peer died and left some behind. The stream calls `writable` for this too.
  // Empty if end() is the first to know.
  virtual std::optional<Error> write_end() const noexcept { return std::nullopt; }
  // Ends writing: the peer reads everything that was written and then finds the end of the stream.
  virtual void finish_writing() noexcept = 0;
};

}  // namespace weft::transport
