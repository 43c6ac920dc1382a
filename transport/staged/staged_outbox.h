// SPDX-License-Identifier: Apache-2.0
// The sending half of a staged connection. A message of host memory that fits into one piece is
// sent directly on the connection below if nothing waits in line. Any other message is cut into
// pieces. A stream copies pieces of device memory into pinned chunks at once, as far as chunks are
// free; each piece is sent on the connection below when its copy is made.
//
// send(), refuse(), lose() and let_go() are thread-safe; everything else runs on the loop.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/transport/connection.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::staged {

class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  // The caller owns `limits`.
  Outbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
         const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // Makes send() fail with `why` from now on. Returns false if it already fails.
  bool refuse(const Error& why);
  // As refuse(), and ends the connection below.
  void lose(const Error& why);
  // Fails, in order, the messages that are not yet with the connection below. (It ends those that
  // are.) Call it after refuse().
  void end() noexcept;
  // Gives up the connection below. Thread-safe; call it after refuse(). (That connection shares the
  // loop, which must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // A message that is cut up. Exists until all its pieces have ended.
  struct Item {
    std::vector<std::byte> header;
    std::vector<Slice> payloads;
    Reached reached;  // its pins are part of `pin`
    std::uint64_t total = 0;
    Fence ready;
    Pin pin;  // held until the last piece has been cut
    std::shared_ptr<Completion> completion;
    std::optional<Error> failure;
    bool is_led = false;       // the connection below has its lead
    std::size_t index = 0;     // of the payload that is cut next
    std::uint64_t offset = 0;  // in that payload
    std::uint64_t cut = 0;     // bytes cut, of all payloads
    bool is_cut_up = false;
    std::size_t pieces = 0;  // pieces that have not ended

    bool is_whole() const { return total <= kChunkBytes; }
  };
  // One message of the connection below, or two if the lead precedes its first chunk.
  struct Piece {
    std::shared_ptr<Item> item;
    std::vector<std::byte> lead;
    std::vector<std::byte> header;
    std::vector<Slice> slices;
    Pin pin;                 // of the memory that the connection below reads
    std::size_t copies = 0;  // copies that are not made yet
    std::optional<Error> error;
  };
  using Copies = std::map<int, std::vector<CopyStream::Copy>>;  // by device
  using Held = std::pair<Pin, Chunks::Lease>;

  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  // Called without mutex_, because it calls drivers. The connection below stays alive meanwhile: it
  // is released only with the last user of this one.
  Reached reach(std::span<const Slice> payloads);
  // True if this many bytes of that payload pass through a chunk.
  bool needs_chunk(const Item& item, std::size_t index, std::uint64_t bytes) const;
  // Returns the loop without sharing it (a callback that held the last reference would destroy it
  // from inside); null if it has ended. The caller holds the loop or runs inside its turn.
  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "send to " + peer_; }

  Op pass(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready)
      WEFT_REQUIRES(mutex_);
  void cut() WEFT_REQUIRES(mutex_);
  bool cut_piece(const std::shared_ptr<Item>& item) WEFT_REQUIRES(mutex_);
  void fill_whole(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk)
      WEFT_REQUIRES(mutex_);
  void fill_next(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk)
      WEFT_REQUIRES(mutex_);
  void await(const std::shared_ptr<Piece>& piece, const Copies& copies, const Pin& held)
      WEFT_REQUIRES(mutex_);
  Op hand_over(Piece& piece) WEFT_REQUIRES(mutex_);

  // The following run on the loop.
  void cut_more();
  void made(Piece& piece, std::optional<Error> error);
  void forward();
  void ended(Piece& piece, const std::optional<Error>& error);

  const std::string peer_;
  const std::shared_ptr<Stage> stage_;
  const Capabilities& limits_;
  const std::size_t direct_bytes_;  // the capability of the connection below
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;
  const std::shared_ptr<Chunks> chunks_;
  CopyStreams streams_;
  // Counts messages that were sent directly and have not ended.
  const std::shared_ptr<std::atomic<std::size_t>> passed_ =
      std::make_shared<std::atomic<std::size_t>>(0);

  Mutex mutex_;
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> below_ WEFT_GUARDED_BY(mutex_);  // not used once failure_ is set
  std::vector<std::byte> front_ WEFT_GUARDED_BY(mutex_);       // scratch whose memory is reused
  std::deque<std::shared_ptr<Item>> line_ WEFT_GUARDED_BY(mutex_);  // not cut up yet
  // Not sent on the connection below yet.
  std::deque<std::shared_ptr<Piece>> pieces_ WEFT_GUARDED_BY(mutex_);
  std::size_t under_way_ WEFT_GUARDED_BY(mutex_) = 0;  // pieces that have not ended
};

}  // namespace weft::transport::staged
