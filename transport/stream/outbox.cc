// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/outbox.h>

namespace weft::transport {

namespace {

// Pieces of one write(); further messages in line wait for the next.
constexpr std::size_t kMaxPieces = 64;
constexpr std::size_t kTurnBytes = 4 << 20;  // in one turn; then the loop does its other work
constexpr std::size_t kOnePiece = 256;  // messages up to this many bytes are written as one piece
constexpr std::array<std::byte, frame::kMaxUnit> kZeros{};

std::optional<std::string> why_unreadable(const Slice& slice) {
  if (!slice.device.is_host()) {
    return "lies on " + describe(slice.device) +
           " and this connection moves host memory only; stage it "
           "(transport/staged/staged_communicator.h)";
  }
  if (slice.bytes > 0 && slice.data == nullptr)
    return "of " + std::to_string(slice.bytes) + " bytes has no address";
  return std::nullopt;
}

Outbox::Bytes bytes_of(const Slice& slice) {
  return {static_cast<const std::byte*>(slice.data), slice.bytes};
}

}  // namespace

Outbox::Outbox(ByteStream& stream, const Capabilities& limits, std::string who,
               const std::string& transport, std::weak_ptr<EventLoop> loop, Again again)
    : stream_(stream),
      limits_(limits),
      who_(std::move(who)),
      loop_(std::move(loop)),
      again_(std::move(again)),
      unit_(stream.unit()),
      reach_(stream.reach()),
      waiting_(trace::depth(trace::Queue::Messages, transport)) {
  queue_own(frame::preamble());
}

void Outbox::queue_own(Bytes bytes) {
  Item item;
  item.front.assign(bytes.begin(), bytes.end());
  item.padding = frame::padding(bytes.size(), unit_);
  item.bytes = bytes.size() + item.padding;
  queue_.push_back(std::move(item));
}

std::optional<Error> Outbox::why_refused(Bytes header, std::span<const Slice> payloads) const {
  if (auto limit = frame::why_too_large(header.size(), payloads.size(), frame::total_of(payloads),
                                        limits_)) {
    return Error(Blame::Caller, "send to " + who_ + ": " + *limit);
  }
  for (const Slice& payload : payloads) {
    if (!payload.device.is_host() && limits_.direct_bytes > 0) continue;  // see why_not_carried()
    if (auto wrong = why_unreadable(payload))
      return Error(Blame::Caller, "send to " + who_ + ": a payload " + *wrong);
  }
  return std::nullopt;
}

std::optional<Error> Outbox::why_not_carried(std::span<const Slice> payloads) const {
  if (limits_.direct_bytes == 0) return std::nullopt;
  for (const Slice& payload : payloads) {
    if (payload.device.is_host() || stream_.carries(payload)) continue;
    return Error(Blame::Caller, "send to " + who_ + ": a payload " + *why_unreadable(payload));
  }
  return std::nullopt;
}

Op Outbox::send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept {
  if (auto wrong = why_refused(header, payloads)) return Op::failed(std::move(*wrong));
  UniqueLock lock(mutex_);
  if (auto why = why_no_more("send")) return Op::failed(std::move(*why));
  if (auto wrong = why_not_carried(payloads)) return Op::failed(std::move(*wrong));
  std::uint64_t bytes = frame::kHeadBytes + payloads.size() * frame::kSizeBytes + header.size();
  bytes += frame::padding(bytes, frame::payload_unit(unit_));
  for (const Slice& payload : payloads) bytes += payload.bytes;
  const std::size_t padding = frame::padding(bytes, unit_);
  bytes += padding;
  const bool is_first = queue_.empty();
  const bool must_await = is_first && !ready.query();
  std::uint64_t written = 0;
  if (is_first && !must_await) {
    const bool is_whole = bytes <= kOnePiece;
    begin(header, payloads, padding, is_whole);
    pieces_.clear();
    pieces_.push_back(front_);
    if (!is_whole) {
      for (const Slice& payload : payloads) pieces_.push_back(bytes_of(payload));
      pieces_.push_back(Bytes(kZeros).first(padding));
    }
    written = stream_.write(pieces_);
    if (written == bytes) return {};
  }
  const Op op = queue(header, payloads, std::move(pin), ready, bytes, padding, written);
  queue_.back().awaited = must_await;
  lock.unlock();
  if (must_await) again_(ready);
  return op;
}

std::optional<Error> Outbox::why_no_more(const char* call) const {
  if (failure_) return failure_;
  if (unheard_) return unheard_;
  if (queue_.size() < limits_.max_queued) return std::nullopt;
  return Error(Blame::Busy,
               std::string(call) + " to " + who_ + ": " + std::to_string(limits_.max_queued) +
                   " messages wait already (max_queued); send again when some are done");
}

Op Outbox::put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
               Fence ready) noexcept {
  if (auto wrong = why_unreadable(from)) {
    return Op::failed(Error(Blame::Caller, "put to " + who_ + ": a source " + *wrong));
  }
  if (offset > to.bytes || from.bytes > to.bytes - offset) {
    return Op::failed(Error(Blame::Caller, "put to " + who_ + ": " + std::to_string(from.bytes) +
                                               " bytes at " + std::to_string(offset) +
                                               " do not fit a region of " +
                                               std::to_string(to.bytes)));
  }
  Op op;
  bool is_first = false;
  {
    MutexLock lock(mutex_);
    if (auto why = why_no_more("put")) return Op::failed(std::move(*why));
    is_first = queue_.empty();
    Item item;
    item.payloads.push_back(from);
    item.place = PutTarget{to, offset};
    item.ready = ready;
    item.awaited = is_first;
    item.completion.emplace(std::move(pin), std::make_shared<LoopFlag>(loop_));
    op = item.completion->op();
    queue_.push_back(std::move(item));
  }
  if (is_first) again_(ready);
  return op;
}

Result<std::shared_ptr<MemoryRegion>> Outbox::expose(const Slice& memory) noexcept {
  if (auto wrong = why_unreadable(memory))
    return Error(Blame::Caller, "memory exposed to " + who_ + " " + *wrong);
  MutexLock lock(mutex_);
  if (failure_ || unheard_) return failure_ ? *failure_ : *unheard_;
  auto region = stream_.placed_writes()->expose(memory);
  if (!region) return region.error().within("memory exposed to " + who_);
  return region;
}

Result<Pin> Outbox::reach(const Slice& memory, cuda::Device& gpu) noexcept {
  {
    MutexLock lock(mutex_);
    if (failure_ || unheard_) return failure_ ? *failure_ : *unheard_;
  }
  if (!reach_)
    return Error(Blame::Unsupported, "the connection to " + who_ + " moves host memory only");
  return reach_(memory, gpu);  // called without mutex_, so the stream may be destroyed by now
}

void Outbox::begin(Bytes header, std::span<const Slice> payloads, std::size_t padding,
                   bool is_whole) {
  frame::encode_front(header.size(), payloads, front_);
  front_.insert(front_.end(), header.begin(), header.end());
  front_.resize(front_.size() + frame::padding(front_.size(), frame::payload_unit(unit_)));
  if (!is_whole) return;
  for (const Slice& payload : payloads) {
    const Bytes bytes = bytes_of(payload);
    front_.insert(front_.end(), bytes.begin(), bytes.end());
  }
  front_.resize(front_.size() + padding);
}

Op Outbox::queue(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready,
                 std::uint64_t bytes, std::size_t padding, std::uint64_t written) {
  Item item;
  begin(header, payloads, 0, /*is_whole=*/false);
  item.front = front_;
  item.padding = padding;
  item.payloads.assign(payloads.begin(), payloads.end());
  item.bytes = bytes;
  item.written = written;
  item.ready = std::move(ready);
  item.waiting = trace::Waiting(waiting_);
  item.completion.emplace(std::move(pin), std::make_shared<LoopFlag>(loop_));
  queue_.push_back(std::move(item));
  return queue_.back().completion->op();
}

bool Outbox::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  return true;
}

void Outbox::flush() noexcept {
  std::optional<Fence> next;
  std::deque<Item> unheard;
  std::optional<Error> why_unheard;
  {
    MutexLock lock(mutex_);
    if (let_go_) return;
    next = write_line();
    // The stream reports it once; later send() calls must return it too.
    if (queue_.empty() && !unheard_) {
      if (auto why = stream_.write_end()) unheard_ = why->within("send to " + who_);
    }
    if (unheard_ && !queue_.empty()) {
      if (!stream_.withdraw(*unheard_)) keep_line();  // before the pins are released
      unheard.swap(queue_);
      why_unheard = unheard_;
    }
    if (queue_.empty() && std::exchange(ending_, false)) stream_.finish_writing();
  }
  if (next) again_(*next);
  // A completion's callback may send and so use these lists, so gone_ is left empty meanwhile.
  std::vector<Item> gone = std::exchange(gone_, {});
  for (Item& item : gone) {
    if (!item.completion) continue;
    if (item.error) {
      item.completion->fail(*item.error);
    } else {
      item.completion->finish();
    }
  }
  for (Item& item : unheard) {
    if (item.completion) item.completion->fail(*why_unheard);
  }
  gone.clear();
  gone_ = std::move(gone);  // reuses its memory; only the loop uses gone_
}

std::optional<Fence> Outbox::write_line() {
  turn_bytes_ = 0;
  while (!queue_.empty()) {
    Item& next = queue_.front();
    if (next.written == 0 && !next.ready.query()) {
      if (std::exchange(next.awaited, true)) return std::nullopt;
      return next.ready;
    }
    if (turn_bytes_ > kTurnBytes) return Fence();
    if (next.place ? put_first() : write_some()) continue;
    if (auto why = stream_.write_end()) unheard_ = why->within("send to " + who_);
    return std::nullopt;  // the stream says when there is room
  }
  return std::nullopt;
}

bool Outbox::write_some() {
  pieces_.clear();
  for (const Item& item : queue_) {
    if (item.place || pieces_.size() >= kMaxPieces || (item.written == 0 && !item.ready.query()))
      break;
    add_pieces(item);
  }
  std::size_t offered = 0;
  for (const Bytes& piece : pieces_) offered += piece.size();
  const std::size_t written = stream_.write(pieces_);
  turn_bytes_ += written;
  settle(written);
  return written == offered;
}

bool Outbox::put_first() {
  Item& item = queue_.front();
  const Bytes piece = bytes_of(item.payloads.front());
  if (!piece.empty()) {
    const auto is_there = stream_.placed_writes()->put(item.place->key, item.place->offset, piece);
    if (is_there && !is_there.value()) return false;
    if (!is_there) item.error = is_there.error().within("put to " + who_);
  }
  turn_bytes_ += piece.size();
  gone_.push_back(std::move(item));
  queue_.pop_front();
  return true;
}

void Outbox::add_pieces(const Item& item) {
  std::uint64_t skip = item.written;
  const auto add = [&](Bytes bytes) WEFT_REQUIRES(mutex_) {
    if (skip >= bytes.size()) {
      skip -= bytes.size();
      return;
    }
    pieces_.push_back(bytes.subspan(static_cast<std::size_t>(std::exchange(skip, 0))));
  };
  add(item.front);
  for (const Slice& payload : item.payloads) add(bytes_of(payload));
  add(Bytes(kZeros).first(item.padding));
}

void Outbox::settle(std::size_t written) {
  while (!queue_.empty()) {
    Item& item = queue_.front();
    const auto part = std::min<std::uint64_t>(written, item.bytes - item.written);
    item.written += part;
    written -= static_cast<std::size_t>(part);
    if (item.written < item.bytes) return;
    preamble_ = true;
    gone_.push_back(std::move(item));
    queue_.pop_front();
    if (written == 0) return;
  }
}

void Outbox::keep_pins() noexcept {
  MutexLock lock(mutex_);
  keep_line();
}

void Outbox::keep_line() noexcept {
  for (Item& item : queue_) {
    if (item.completion) item.completion->keep_pin();
  }
}

bool Outbox::end(const std::optional<std::string>& reason) noexcept {
  std::deque<Item> pending;
  std::optional<Error> why;
  bool is_heard = false;
  {
    MutexLock lock(mutex_);
    pending.swap(queue_);
    why = failure_;
    const bool is_cut = !pending.empty() && pending.front().written > 0;
    is_heard = preamble_ && !let_go_ && !unheard_;
    if (reason && is_heard && !is_cut) {
      queue_own(frame::encode_goodbye(*reason));
    }
    ending_ = !let_go_;
  }
  for (Item& item : pending) {
    if (item.completion) item.completion->fail(*why);
  }
  flush();
  return is_heard;
}

void Outbox::let_go() noexcept {
  MutexLock lock(mutex_);
  let_go_ = true;
}

}  // namespace weft::transport
