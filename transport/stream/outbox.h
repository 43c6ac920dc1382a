// SPDX-License-Identifier: Apache-2.0
// The sending half of a StreamConnection. A message that can be written is written at once, on the
// thread that calls send(), and needs no allocation; otherwise it waits in line and the loop writes
// it. send(), put(), expose(), reach() and refuse() are thread-safe; everything else runs on the
// loop.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>
#include <weft/profiling/trace/depth.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

class Outbox {
 public:
  using Bytes = ByteStream::Bytes;
  // Calls flush() on the loop, in a later turn, once the fence has passed.
  using Again = std::function<void(const Fence&)>;

  // `who` names the connection in messages. `transport` names the trace counter of waiting
  // messages. The preamble is first in line.
  Outbox(ByteStream& stream, const Capabilities& limits, std::string who,
         const std::string& transport, std::weak_ptr<EventLoop> loop, Again again);

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // As in OneSided, over a stream that has placed writes.
  Op put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
         Fence ready) noexcept;
  Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) noexcept;
  // As in Connection.
  Result<Pin> reach(const Slice& memory, cuda::Device& gpu) noexcept;
  // Makes send() and put() fail with `why` from now on. Returns false if they already fail.
  // Thread-safe.
  bool refuse(const Error& why);

  // Writes everything that may be written.
  void flush() noexcept;
  // Keeps the memory of the messages in line until the process ends.
  void keep_pins() noexcept;
  // Fails the messages in line, in order, with the error of refuse(), and writes no more of them.
  // Then writes a goodbye if `reason` is given and no message was cut. Returns whether the peer can
  // still read.
  bool end(const std::optional<std::string>& reason) noexcept;
  // Stops using the stream.
  void let_go() noexcept;

 private:
  // The target of a put, which writes no bytes to the stream.
  struct PutTarget {
    RegionKey key;
    std::uint64_t offset = 0;
  };
  struct Item {
    std::vector<std::byte> front;  // head, table and header, and zeros up to the payloads
    std::vector<Slice> payloads;
    std::optional<PutTarget> place;  // the target if this is a put of the one payload
    std::uint64_t bytes = 0;         // of the whole message, including `padding`
    std::size_t padding = 0;         // zeros behind the message
    std::uint64_t written = 0;
    Fence ready;
    bool awaited = false;                  // flush() will be called when `ready` has passed
    std::optional<Completion> completion;  // empty for preamble and goodbye
    std::optional<Error> error;            // of this message alone
    trace::Waiting waiting = {};
  };

  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  // Checks payloads on GPUs.
  std::optional<Error> why_not_carried(std::span<const Slice> payloads) const WEFT_REQUIRES(mutex_);
  // Writes a message to front_ up to its payloads, or all of it if `is_whole`.
  void begin(Bytes header, std::span<const Slice> payloads, std::size_t padding, bool is_whole)
      WEFT_REQUIRES(mutex_);
  // Queues a message of which `written` bytes are written; returns its Op.
  Op queue(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready, std::uint64_t bytes,
           std::size_t padding, std::uint64_t written) WEFT_REQUIRES(mutex_);
  // Returns the connection's end, or Busy if the line is full.
  std::optional<Error> why_no_more(const char* call) const WEFT_REQUIRES(mutex_);
  // Queues the preamble or a goodbye.
  void queue_own(Bytes bytes) WEFT_REQUIRES(mutex_);
  // Writes messages in line. Returns the fence that must pass before it can go on; empty if the
  // line is empty or if the stream will report that it can go on.
  std::optional<Fence> write_line() WEFT_REQUIRES(mutex_);
  void keep_line() noexcept WEFT_REQUIRES(mutex_);  // as keep_pins()
  // Calls write() once for messages in line that are ready. Returns whether all of those were
  // written.
  bool write_some() WEFT_REQUIRES(mutex_);
  // Performs the put that is first in line. Returns whether it has ended.
  bool put_first() WEFT_REQUIRES(mutex_);
  void add_pieces(const Item& item) WEFT_REQUIRES(mutex_);
  void settle(std::size_t written) WEFT_REQUIRES(mutex_);

  ByteStream& stream_;
  const Capabilities& limits_;
  const std::string who_;
  const std::weak_ptr<EventLoop> loop_;
  const Again again_;
  const std::size_t unit_;  // the stream's
  const ByteStream::Reach reach_;
  trace::Depth& waiting_;  // counts waiting messages of this transport

  Mutex mutex_;  // also held while the stream is written
  std::deque<Item> queue_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  // Set when the peer reads no more although not everything it sent has been read.
  std::optional<Error> unheard_ WEFT_GUARDED_BY(mutex_);
  bool ending_ WEFT_GUARDED_BY(mutex_) = false;    // finish_writing() is due once the line is empty
  bool let_go_ WEFT_GUARDED_BY(mutex_) = false;    // the stream is no longer used
  bool preamble_ WEFT_GUARDED_BY(mutex_) = false;  // the preamble is written completely
  std::size_t turn_bytes_ WEFT_GUARDED_BY(mutex_) = 0;
  // This and pieces_ are scratch whose memory is reused.
  std::vector<std::byte> front_ WEFT_GUARDED_BY(mutex_);
  std::vector<Bytes> pieces_ WEFT_GUARDED_BY(mutex_);
  // Written, but not completed yet. Only flush() on the loop uses it, so it needs no mutex.
  std::vector<Item> gone_;
};

}  // namespace weft::transport
