// What StreamConnection needs of a transport that moves bytes: a pair of non-blocking streams to
// one peer. TCP is one, a ring in shared memory is one; encryption would be one over another.
// Reading and writing may happen on two threads at once, each by one thread at a time. No call
// blocks.
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

// The one-sided writes of a stream that has them. Called as its write() is, by one thread at a
// time.
class PlacedWrites {
 public:
  // As OneSided::expose, of host memory.
  virtual Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) = 0;
  // Whether the piece, which the region holds, is there. Where it is not yet, the next call of
  // put() or write() is this one again, after `writable`. An error is of this call alone.
  virtual Result<bool> put(const RegionKey& to, std::uint64_t offset,
                           std::span<const std::byte> piece) noexcept = 0;

 protected:
  ~PlacedWrites() = default;
};

class ByteStream {
 public:
  using Bytes = std::span<const std::byte>;

  virtual ~ByteStream() = default;
  // Who is at the other end, for messages.
  virtual std::string peer() const = 0;

  // Begins to watch, on the loop: `readable` is called when there may be something to read, also
  // the stream's end; `writable` after a write() that took less than it was given, when there may
  // be room. A connection that is still being made takes no bytes until it is; one that cannot be
  // made ends. The functions are not called after stop() has returned on the loop, or once the turn
  // that runs meanwhile has ended.
  virtual void start(EventLoop& loop, std::function<void()> readable,
                     std::function<void()> writable) = 0;
  virtual void stop() noexcept = 0;

  // Takes bytes from the pieces, in order, as much as there is room for; returns how many. After an
  // error 0; see end().
  virtual std::size_t write(std::span<const Bytes> pieces) noexcept = 0;

  // What has come and lies in memory of the stream, contiguous, at least `wanted` bytes of it if so
  // many have come and the stream can show them in one piece (see window(); over several sockets
  // there are bytes that lie apart); empty when nothing has come. Valid until the next call that
  // reads.
  virtual Bytes peek(std::size_t wanted) noexcept = 0;
  // Lets go of what peek() showed.
  virtual void consume(std::size_t bytes) noexcept = 0;
  // Moves up to to.size() bytes there, those that peek() would show first; returns how many, 0 when
  // nothing has come.
  virtual std::size_t read(std::span<std::byte> to) noexcept = 0;
  // The most that one peek() can show.
  virtual std::size_t window() const = 0;
  // A stream may move what is long without a copy, and after a read() or write() that took less
  // than all be at work on that memory; the next such call then begins with the same. Once this has
  // returned, on the loop, it is not: the memory may go, and what was in the middle of it is cut.
  // False where the device could not be stopped: the memory must stay then.
  virtual bool withdraw(const Error& /*why*/) noexcept { return true; }
  // Messages up to so many bytes, at most window(), are shown when all of them lies here: where the
  // receiver can work on them in place, that is worth more than to begin early. Such a stream's
  // end() is known as soon as nothing more comes.
  virtual std::size_t shown_whole() const { return 0; }
  // Messages begin at multiples of so many bytes of the stream, a power of two; the same on both
  // ends. More than 1 where neighbours in one cache line would cost more than the bytes between
  // them, and where payloads are used in place.
  virtual std::size_t unit() const { return 1; }

  // What Connection::reach() does. Asked for once, then called on every thread, also when the
  // stream is gone: a call takes long, and the lane may end in the middle of it. Does not throw.
  // Null where the stream moves host memory only.
  using Reach = std::function<Result<Pin>(const Slice& memory, cuda::Device& gpu)>;
  virtual Reach reach() const { return nullptr; }
  // Whether this memory of a GPU may be written from and read to: reached, by a pin that still
  // lives, and longer than window(). Its bytes are not touched then, but moved as those of a long
  // piece of the host's are, without a copy. For every thread.
  virtual bool carries(const Slice& /*memory*/) const noexcept { return false; }

  // Null where the stream has none.
  virtual PlacedWrites* placed_writes() { return nullptr; }

  // Why no more will be read, once everything that came has been. Writing may end earlier; the
  // reason is the same.
  virtual std::optional<Error> end() const noexcept = 0;
  // Why nothing more can be written, where the stream knows that while there may be more to read:
  // the peer died, and left something behind. `writable` is called for it as well. Nothing where
  // end() is the first to know.
  virtual std::optional<Error> write_end() const noexcept { return std::nullopt; }
  // No more writes: the peer reads what was written and then finds the end.
  virtual void finish_writing() noexcept = 0;
};

}  // namespace weft::transport
