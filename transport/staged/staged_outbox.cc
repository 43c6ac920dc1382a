// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/staged/staged_outbox.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::staged {

namespace {

// Pinned chunks per connection: enough to keep the GPU's copies and the connection below busy all
// the time.
constexpr std::size_t kChunks = 8;
constexpr std::size_t kMaxPieces = 16;  // sent on the connection below or on their way there

const std::byte kChunkHeader[] = {static_cast<std::byte>(Kind::Chunk)};

// Returns the bytes of the message's next chunk.
template <class Item>
std::size_t next_bytes(const Item& item) {
  const std::uint64_t left = item.payloads[item.index].bytes - item.offset;
  return static_cast<std::size_t>(std::min<std::uint64_t>(left, kChunkBytes));
}

bool is_host(std::span<const Slice> slices) {
  return std::all_of(slices.begin(), slices.end(),
                     [](const Slice& slice) { return slice.device.is_host(); });
}

}  // namespace

Outbox::Outbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
               const Capabilities& limits, const std::shared_ptr<EventLoop>& loop)
    : peer_(below->peer()),
      stage_(std::move(stage)),
      limits_(limits),
      direct_bytes_(below->capabilities().direct_bytes),
      loop_(loop),
      loop_address_(loop.get()),
      chunks_(std::make_shared<Chunks>(*stage_, kChunks)),
      streams_(*stage_, loop),
      below_(std::move(below)) {}

std::optional<Error> Outbox::why_refused(Bytes header, std::span<const Slice> payloads) const {
  const auto wrong = [&](const std::string& text) {
    return Error(Blame::Caller, name() + ": " + text);
  };
  if (auto limit = frame::why_too_large(header.size(), payloads.size(), frame::total_of(payloads),
                                        limits_)) {
    return wrong(*limit);
  }
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (const auto why = stage_->why_not(payloads[i]))
      return wrong("payload " + std::to_string(i) + " is " + *why);
  }
  return std::nullopt;
}

// --- sending, on the caller's thread

Op Outbox::send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept {
  if (auto wrong = why_refused(header, payloads)) return Op::failed(std::move(*wrong));
  const std::uint64_t total = *frame::total_of(payloads);
  const bool is_all_host = is_host(payloads);
  Reached reached;
  if (!is_all_host) reached = reach(payloads);
  MutexLock lock(mutex_);
  if (failure_) return Op::failed(*failure_);
  if (passed_->load(std::memory_order_relaxed) + line_.size() >= limits_.max_queued) {
    return Op::failed(Error(
        Blame::Busy, name() + ": " + std::to_string(limits_.max_queued) +
                         " messages wait already (max_queued); send again when some are done"));
  }
  if (is_all_host && total <= kChunkBytes && line_.empty() && pieces_.empty()) {
    return pass(header, payloads, std::move(pin), std::move(ready));
  }
  auto item = std::make_shared<Item>();
  item->header.assign(header.begin(), header.end());
  item->payloads.assign(payloads.begin(), payloads.end());
  item->total = total;
  item->ready = std::move(ready);
  item->pin = reached.join_pins(pin);
  item->reached = std::move(reached);
  // Streams can wait for this flag if a payload is device memory.
  auto flag = is_all_host ? std::static_pointer_cast<HostFlag>(std::make_shared<LoopFlag>(loop_))
                          : stage_->flags().make();
  item->completion = ending_of(Completion(std::move(pin), std::move(flag)), name());
  const Op op = item->completion->op();
  line_.push_back(std::move(item));
  cut();
  return op;
}

Reached Outbox::reach(std::span<const Slice> payloads) {
  Connection* below = nullptr;
  {
    MutexLock lock(mutex_);
    if (!failure_) below = below_.get();
  }
  return below != nullptr ? reach_with(*below, *stage_, payloads) : Reached();
}

bool Outbox::needs_chunk(const Item& item, std::size_t index, std::uint64_t bytes) const {
  if (item.payloads[index].device.is_host() || bytes == 0) return false;
  return !item.reached[index] || bytes < direct_bytes_;
}

Op Outbox::pass(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) {
  encode_whole(header, front_);
  Op op = below_->send(front_, payloads, std::move(pin), std::move(ready));
  if (op.ended()) return op;
  passed_->fetch_add(1, std::memory_order_relaxed);
  op.on_ended([passed = passed_] { passed->fetch_sub(1, std::memory_order_relaxed); });
  return op;
}

bool Outbox::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  streams_.close(why);
  return true;
}

void Outbox::lose(const Error& why) {
  const bool is_first = refuse(why);
  MutexLock lock(mutex_);
  if (is_first && below_) below_->close(why);
}

// --- cutting, on any thread

void Outbox::cut() {
  while (!line_.empty() && under_way_ < kMaxPieces && !failure_) {
    const auto item = line_.front();
    if (!item->failure && !cut_piece(item)) return;
    if (item->is_cut_up || item->failure) line_.pop_front();
  }
}

// Returns false if it needs a chunk and none is free.
bool Outbox::cut_piece(const std::shared_ptr<Item>& item) {
  while (!item->is_whole() && item->offset == item->payloads[item->index].bytes) {
    ++item->index;
    item->offset = 0;
  }
  bool is_staged = false;
  if (item->is_whole()) {
    for (std::size_t i = 0; i < item->payloads.size(); ++i)
      is_staged |= needs_chunk(*item, i, item->payloads[i].bytes);
  } else {
    is_staged = needs_chunk(*item, item->index, next_bytes(*item));
  }
  Chunks::Lease chunk;
  if (is_staged) {
    chunk = chunks_->take([weak = weak_from_this()] {
      const auto self = weak.lock();
      auto* const here = self ? self->loop() : nullptr;
      if (here)
        here->post([weak] {
          if (const auto again = weak.lock()) again->cut_more();
        });
    });
    if (!chunk) return false;
  }
  const auto piece = std::make_shared<Piece>();
  const auto held = std::make_shared<Held>(item->pin, chunk);
  Copies copies;
  piece->item = item;
  piece->pin = held;
  if (item->is_whole()) {
    fill_whole(*piece, *item, copies, chunk);
  } else {
    fill_next(*piece, *item, copies, chunk);
  }
  ++item->pieces;
  ++under_way_;
  pieces_.push_back(piece);
  await(piece, copies, held);
  if (item->is_cut_up) item->pin.reset();
  return true;
}

// Host payloads are sent from where they are; device payloads share one chunk.
void Outbox::fill_whole(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk) {
  encode_whole(item.header, piece.header);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < item.payloads.size(); ++i) {
    const Slice& payload = item.payloads[i];
    if (payload.bytes == 0) {
      piece.slices.push_back({nullptr, 0, Device::host()});
      continue;
    }
    if (!needs_chunk(item, i, payload.bytes)) {
      piece.slices.push_back(payload);
      continue;
    }
    piece.slices.push_back(chunk->part(offset, payload.bytes));
    copies[payload.device.index].push_back({piece.slices.back(), payload});
    offset += payload.bytes;
  }
  item.is_cut_up = true;
}

void Outbox::fill_next(Piece& piece, Item& item, Copies& copies, const Chunks::Lease& chunk) {
  if (item.cut == 0) piece.lead = encode_lead(item.header, item.payloads);
  piece.header.assign(std::begin(kChunkHeader), std::end(kChunkHeader));
  const Slice& payload = item.payloads[item.index];
  const std::size_t bytes = next_bytes(item);
  const Slice part = payload.part(static_cast<std::size_t>(item.offset), bytes);
  piece.slices.push_back(chunk ? chunk->part(0, bytes) : part);
  if (chunk) copies[part.device.index].push_back({piece.slices.back(), part});
  item.offset += bytes;
  item.cut += bytes;
  item.is_cut_up = item.cut == item.total;
}

// Calls made() on the loop when the copies are made, or, without copies, when the bytes are ready.
void Outbox::await(const std::shared_ptr<Piece>& piece, const Copies& copies, const Pin& held) {
  auto* const here = loop();
  if (!here) return;
  const Fence& ready = piece->item->ready;
  piece->copies = std::max<std::size_t>(copies.size(), 1);
  if (copies.empty()) {
    // Both references are weak, because the fence's owner may keep the callback for ever.
    return here->when(ready, [weak = weak_from_this(), waiting = std::weak_ptr(piece)] {
      const auto self = weak.lock();
      const auto still = waiting.lock();
      if (self && still) self->made(*still, std::nullopt);
    });
  }
  for (const auto& [device, of_device] : copies) {
    const Op op = streams_.on(device).run(name() + " through pinned memory", of_device, held, ready,
                                          shared_from_this());
    // Posted, because a copy that could not be enqueued has already ended, and mutex_ is locked.
    op.on_ended([weak = weak_from_this(), piece, op] {
      const auto self = weak.lock();
      auto* const still_here = self ? self->loop() : nullptr;
      if (still_here)
        still_here->post([weak, piece, op] {
          if (const auto again = weak.lock()) again->made(*piece, op.error());
        });
    });
  }
}

void Outbox::cut_more() {
  MutexLock lock(mutex_);
  cut();
}

// --- handing over, on the loop

void Outbox::made(Piece& piece, std::optional<Error> error) {
  if (!error) error = stage_->why_lost(piece.slices);  // the fences of a lost GPU count as passed
  {
    MutexLock lock(mutex_);
    if (error && !piece.error) piece.error = error;
    if (--piece.copies > 0) return;
  }
  forward();
}

void Outbox::forward() {
  for (;;) {
    std::shared_ptr<Piece> piece;
    Op sent;
    {
      MutexLock lock(mutex_);
      if (pieces_.empty() || pieces_.front()->copies > 0) return;
      piece = std::move(pieces_.front());
      pieces_.pop_front();
      sent = hand_over(*piece);
    }
    sent.on_ended([weak = weak_from_this(), piece, sent] {
      if (const auto self = weak.lock()) self->ended(*piece, sent.error());
    });
  }
}

Op Outbox::hand_over(Piece& piece) {
  Item& item = *piece.item;
  if (failure_) return Op::failed(*failure_);
  if (item.failure) piece.error = item.failure;
  if (piece.error) {
    item.failure = piece.error;
    return Op::failed(*piece.error);
  }
  if (!piece.lead.empty()) {
    item.is_led = true;
    below_->send(piece.lead, {}, nullptr, {});  // if this fails, so does the next send
  }
  return below_->send(piece.header, piece.slices, piece.pin, {});
}

void Outbox::ended(Piece& piece, const std::optional<Error>& error) {
  piece.pin.reset();
  Item& item = *piece.item;
  bool is_over = false;
  {
    MutexLock lock(mutex_);
    --under_way_;
    --item.pieces;
    if (error && !item.failure) item.failure = error;
    is_over = item.is_cut_up && item.pieces == 0;
    cut();
  }
  if (!error) {
    if (is_over) item.completion->finish();
    return;
  }
  item.completion->fail(*error);
  if (piece.error && !item.is_led) return;  // the peer knows nothing of this message
  lose(*error);
  end();
}

std::shared_ptr<Connection> Outbox::let_go() noexcept {
  MutexLock lock(mutex_);
  return std::exchange(below_, nullptr);
}

void Outbox::end() noexcept {
  std::deque<std::shared_ptr<Item>> line;
  std::deque<std::shared_ptr<Piece>> pieces;
  std::optional<Error> why;
  {
    MutexLock lock(mutex_);
    line.swap(line_);
    pieces.swap(pieces_);
    under_way_ -= pieces.size();
    why = failure_;
  }
  for (const auto& piece : pieces) piece->item->completion->fail(*why);
  for (const auto& item : line) item->completion->fail(*why);
  streams_.fail(*why);
}

}  // namespace weft::transport::staged
