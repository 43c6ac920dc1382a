// The sending half of a staged connection. A message of host memory that fits into one piece goes
// straight to the lane below while nothing waits in line. Any other one is cut into pieces; those
// of device memory are copied into pinned chunks by a stream, at once, as far as there are chunks,
// and each goes to the lane below when its copy is made.
//
// send(), refuse() are for every thread, the rest for the loop.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weft/transport/connection.h>
#include <weft/transport/staged_frame.h>
#include <weft/transport/staging.h>

namespace weft::transport::staged {

class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  // `limits` stay the caller's.
  Outbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
         const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // From now on send() fails with this. False where it does already.
  bool refuse(const Error& why);
  // The same, and ends the lane below.
  void lose(const Error& why);
  // After refuse(): fails what has not gone to the lane below, in order. (That ends what has.)
  void end() noexcept;
  // After refuse(), for every thread: gives up the lane below. (It has a share in the loop, which
  // must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // A message that is cut up, until all its pieces have ended.
  struct Item {
    std::vector<std::byte> header;
    std::vector<Slice> payloads;
    Reached reached;  // their pins are a part of `pin`
    std::uint64_t total = 0;
    Fence ready;
    Pin pin;  // until the last piece has been made
    std::shared_ptr<Completion> completion;
    std::optional<Error> failure;
    bool is_led = false;       // the lane below has its lead
    std::size_t index = 0;     // of the payload that is cut next
    std::uint64_t offset = 0;  // in it
    std::uint64_t cut = 0;     // bytes, of all payloads
    bool is_cut_up = false;
    std::size_t pieces = 0;  // that have not ended

    bool is_whole() const { return total <= kChunkBytes; }
  };
  // One message of the lane below, or two where the lead goes before its first chunk.
  struct Piece {
    std::shared_ptr<Item> item;
    std::vector<std::byte> lead;
    std::vector<std::byte> header;
    std::vector<Slice> slices;
    Pin pin;                 // of what the lane below reads
    std::size_t copies = 0;  // that are not made yet
    std::optional<Error> error;
  };
  using Copies = std::map<int, std::vector<CopyStream::Copy>>;  // by device
  using Held = std::pair<Pin, Chunks::Lease>;

  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  // Not under the mutex: drivers are asked. The lane below stays meanwhile, as it goes with the
  // last user of this one.
  Reached reach(std::span<const Slice> payloads);
  // Whether so many bytes of that payload go through a chunk.
  bool needs_chunk(const Item& item, std::size_t index, std::uint64_t bytes) const;
  // The loop, without a share in it (a turn that held the last one would end it from inside); null
  // where it has ended. Whoever calls this holds it, or is inside its turn.
  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "send to " + peer_; }

  // Under the mutex.
  Op pass(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready);
  void cut();
  bool cut_piece(const std::shared_ptr<Item>& item);
  void fill_whole(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk);
  void fill_next(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk);
  void await(const std::shared_ptr<Piece>& piece, const Copies& copies, const Pin& held);
  Op hand_over(Piece& piece);

  // On the loop.
  void cut_more();
  void made(Piece& piece, std::optional<Error> error);
  void forward();
  void ended(Piece& piece, const std::optional<Error>& error);

  const std::string peer_;
  const std::shared_ptr<Stage> stage_;
  const Capabilities& limits_;
  const std::size_t direct_bytes_;  // of the lane below
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;
  const std::shared_ptr<Chunks> chunks_;
  CopyStreams streams_;
  // Messages that went straight through and have not ended.
  const std::shared_ptr<std::atomic<std::size_t>> passed_ =
      std::make_shared<std::atomic<std::size_t>>(0);

  std::mutex mutex_;  // of what follows
  std::optional<Error> failure_;
  std::shared_ptr<Connection> below_;          // not touched once there is a failure
  std::vector<std::byte> front_;               // scratch; keeps its memory
  std::deque<std::shared_ptr<Item>> line_;     // not cut up yet
  std::deque<std::shared_ptr<Piece>> pieces_;  // not with the lane below yet
  std::size_t under_way_ = 0;                  // pieces that have not ended
};

}  // namespace weft::transport::staged
