// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <utility>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/staged/staged_inbox.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::staged {

namespace {

constexpr std::size_t kChunks = 8;  // pinned, per connection

using Held = std::pair<Pin, Chunks::Lease>;

bool is_on_device(const Slice& slice) { return !slice.device.is_host() && slice.bytes > 0; }
Slice nothing() { return {nullptr, 0, Device::host()}; }

}  // namespace

Inbox::Inbox(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
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

Chunks::Lease Inbox::take_chunk() {
  return chunks_->take([weak = weak_from_this()] {
    const auto self = weak.lock();
    auto* const here = self ? self->loop() : nullptr;
    if (here)
      here->post([weak] {
        if (const auto again = weak.lock()) again->go_on();
      });
  });
}

// --- accepting, on any thread

std::optional<Error> Inbox::why_refused(std::span<const Slice> destinations) const {
  const auto wrong = [&](const std::string& text) {
    return Error(Blame::Caller, name() + ": " + text);
  };
  if (failure_) return failure_;
  if (stand_ != Stand::Shown)
    return wrong("no message waits to be accepted; accept each once, after it has arrived");
  const auto misfit = frame::why_misfit(destinations, sizes_,
                                        [this](const Slice& to) { return stage_->why_not(to); });
  if (misfit) return wrong(*misfit);
  return std::nullopt;
}

Result<Reached> Inbox::reach(std::span<const Slice> destinations) {
  Connection* below = nullptr;
  {
    MutexLock lock(mutex_);
    if (auto wrong = why_refused(destinations)) return std::move(*wrong);
    below = below_.get();
  }
  return reach_with(*below, *stage_, destinations);
}

Op Inbox::accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept {
  std::optional<Taken> taken;
  Op op;
  const bool has_device = std::any_of(destinations.begin(), destinations.end(), is_on_device);
  auto reached = has_device ? reach(destinations) : Reached();
  if (!reached) return Op::failed(reached.error());
  {
    MutexLock lock(mutex_);
    if (auto wrong = why_refused(destinations))
      return Op::failed(std::move(*wrong));  // the message still waits
    if (kind_ == Kind::Whole && !has_device) {
      stand_ = Stand::None;
      std::vector<Slice> on_host(destinations.begin(), destinations.end());
      for (Slice& slice : on_host) slice.device = Device::host();  // changes only empty slices
      return below_->accept(on_host, std::move(pin), std::move(ready));
    }
    // Streams can wait for this flag if a destination is device memory.
    auto flag = has_device ? stage_->flags().make()
                           : std::static_pointer_cast<HostFlag>(std::make_shared<LoopFlag>(loop_));
    landing_ = std::make_shared<Landing>(ending_of(Completion(pin, std::move(flag)), name()));
    op = landing_->op();
    destinations_.assign(destinations.begin(), destinations.end());
    reached_ = std::move(reached).value();
    pin_ = reached_.join_pins(std::move(pin));
    ready_ = std::move(ready);
    stand_ = Stand::Accepted;
    index_ = 0;
    offset_ = come_ = waiting_ = 0;
    if (kind_ == Kind::Whole) {
      waiting_ = total_;
      taken = take_whole();
    } else {
      below_->accept({}, nullptr, {});  // accepts the lead, so that the chunks arrive
    }
  }
  if (taken) when_landed(std::move(*taken));
  return op;
}

bool Inbox::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  streams_.close(why);
  return true;
}

// --- taking

// True if this many bytes of that destination pass through a chunk.
bool Inbox::needs_chunk(std::size_t index, std::uint64_t bytes) const {
  if (destinations_[index].device.is_host() || bytes == 0) return false;
  return !reached_[index] || bytes < direct_bytes_;
}

// Returns nothing if no chunk is free, like take_part().
std::optional<Inbox::Taken> Inbox::take_whole() {
  bool is_staged = false;
  for (std::size_t i = 0; i < destinations_.size(); ++i)
    is_staged |= needs_chunk(i, destinations_[i].bytes);
  const Chunks::Lease chunk = is_staged ? take_chunk() : nullptr;
  if (is_staged && !chunk) return std::nullopt;
  Taken taken{.held = std::make_shared<Held>(pin_, chunk),
              .landing = landing_,
              .ready = ready_,
              .is_last = true};
  std::vector<Slice> slices;
  std::size_t offset = 0;
  bool is_written_below = false;
  for (std::size_t i = 0; i < destinations_.size(); ++i) {
    const Slice& to = destinations_[i];
    if (needs_chunk(i, to.bytes)) {
      slices.push_back(chunk->part(offset, to.bytes));
      taken.copies.push_back({to, slices.back()});
      offset += to.bytes;
    } else {
      slices.push_back(to.bytes > 0 ? to : nothing());
      is_written_below = is_written_below || to.bytes > 0;
      if (is_on_device(to)) taken.direct.push_back(to);
    }
  }
  landing_->begin_part();
  taken.op = below_->accept(slices, taken.held, is_written_below ? ready_ : Fence());
  forget();
  return taken;
}

std::optional<Inbox::Taken> Inbox::take_part() {
  const auto bytes = static_cast<std::size_t>(waiting_);
  Taken taken{.landing = landing_, .ready = ready_};
  if (destinations_.empty()) {
    taken.op = below_->accept({}, nullptr, {});
  } else if (const Slice to = destinations_[index_].part(static_cast<std::size_t>(offset_), bytes);
             !needs_chunk(index_, bytes)) {
    taken.op = below_->accept({&to, 1}, pin_, ready_);
    if (is_on_device(to)) taken.direct.push_back(to);
  } else {
    const Chunks::Lease chunk = take_chunk();
    if (!chunk) return std::nullopt;
    const Slice piece = chunk->part(0, bytes);
    taken.held = std::make_shared<Held>(pin_, chunk);
    taken.copies.push_back({to, piece});
    taken.op = below_->accept({&piece, 1}, taken.held, {});
  }
  landing_->begin_part();
  waiting_ = 0;
  offset_ += bytes;
  come_ += bytes;
  taken.is_last = come_ == total_;
  if (taken.is_last) forget();
  return taken;
}

// Drops the state of a message whose remaining work no longer needs this object.
void Inbox::forget() {
  stand_ = Stand::None;
  waiting_ = 0;
  landing_.reset();
  pin_.reset();
  ready_ = {};
}

std::optional<std::string> Inbox::why_wrong(std::uint64_t bytes) {
  if (stand_ != Stand::Accepted || kind_ != Kind::Lead) return "a chunk without a lead";
  while (index_ < sizes_.size() && offset_ == sizes_[index_]) {
    ++index_;
    offset_ = 0;
  }
  if (index_ == sizes_.size() || bytes > sizes_[index_] - offset_)
    return "a chunk that extends past its payload's end";
  return std::nullopt;
}

std::optional<std::string> Inbox::take(const Arrival& below, const Arrived& arrived) {
  std::optional<Taken> taken;
  Decoded decoded;
  std::span<const std::uint64_t> sizes;
  {
    MutexLock lock(mutex_);
    if (failure_) return std::nullopt;
    decoded = decode(below, limits_, decoded_sizes_);
    if (decoded.wrong) return decoded.wrong;
    if (decoded.kind == Kind::Chunk) {
      if (auto wrong = why_wrong(decoded.total)) return wrong;
      waiting_ = decoded.total;
      taken = take_part();
    } else {
      if (stand_ != Stand::None) return "a message inside another one";
      stand_ = Stand::Shown;
      kind_ = decoded.kind;
      total_ = decoded.total;
      sizes_.swap(decoded_sizes_);
      sizes = sizes_;
    }
  }
  if (taken) when_landed(std::move(*taken));
  if (decoded.kind != Kind::Chunk) arrived({decoded.header, sizes, below.in_place});
  return std::nullopt;
}

void Inbox::go_on() {
  std::optional<Taken> taken;
  {
    MutexLock lock(mutex_);
    if (failure_ || stand_ != Stand::Accepted || waiting_ == 0) return;
    taken = kind_ == Kind::Whole ? take_whole() : take_part();
  }
  if (taken) when_landed(std::move(*taken));
}

// --- landing

void Inbox::when_landed(Taken taken) {
  const Op op = taken.op;
  op.on_ended([weak = weak_from_this(), taken = std::move(taken)]() mutable {
    if (const auto self = weak.lock()) self->land(std::move(taken));
  });
}

void Inbox::land(Taken taken) {
  const auto error = taken.op.error() ? taken.op.error() : stage_->why_lost(taken.direct);
  if (error && error->blame() == Blame::Caller) end_below(*error);
  if (!error) {
    std::map<int, std::vector<CopyStream::Copy>> copies;
    for (const auto& copy : taken.copies) copies[copy.to.device.index].push_back(copy);
    for (auto& [device, of_device] : copies) {
      taken.landing->begin_part();
      const Op made =
          streams_.on(device).run(name() + " through pinned memory", std::move(of_device),
                                  taken.held, taken.ready, shared_from_this());
      made.on_ended([landing = taken.landing, made] { landing->end_part(made.error()); });
    }
  } else {
    // If the connection has ended nothing more arrives for this message: release the pin before the
    // error is reported.
    MutexLock lock(mutex_);
    if (failure_ && landing_ == taken.landing) pin_.reset();
  }
  taken.held.reset();
  taken.landing->end_part(error);
  if (taken.is_last) taken.landing->end_part(std::nullopt);
}

// The connection below refused a destination that it had reported as reachable, and shows nothing
// more until the message is accepted: end it.
void Inbox::end_below(const Error& why) {
  MutexLock lock(mutex_);
  if (!failure_ && below_) below_->close(why);
}

std::shared_ptr<Connection> Inbox::let_go() noexcept {
  MutexLock lock(mutex_);
  return std::exchange(below_, nullptr);
}

void Inbox::end() noexcept {
  std::shared_ptr<Landing> landing;
  std::optional<Error> why;
  {
    MutexLock lock(mutex_);
    landing = landing_;
    why = failure_;
    forget();
  }
  if (landing) landing->fail(*why);
  streams_.fail(*why);
}

}  // namespace weft::transport::staged
