// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/inbox.h>

namespace weft::transport {

namespace {

// Bytes that one turn reads before the loop's other work has its turn. A message counts as at least
// kMessageBytes.
constexpr std::size_t kTurnBytes = 4 << 20;
constexpr std::size_t kMessageBytes = 1 << 10;
// Messages up to this size are always shown whole: copying them takes less time than returning for
// the rest.
constexpr std::size_t kShort = 16 << 10;

void copy_out(Inbox::Bytes from, std::span<const Slice> to) {
  for (const Slice& slice : to) {
    if (slice.bytes > 0) std::memcpy(slice.data, from.data(), slice.bytes);
    from = from.subspan(slice.bytes);
  }
}

}  // namespace

Inbox::Inbox(ByteStream& stream, const Capabilities& limits, std::string who,
             std::weak_ptr<EventLoop> loop, Again again, Soon soon)
    : stream_(stream),
      limits_(limits),
      who_(std::move(who)),
      loop_(std::move(loop)),
      again_(std::move(again)),
      soon_(std::move(soon)),
      unit_(stream.unit()),
      whole_(std::min(stream.shown_whole(), kShort)) {}

// --- accepting, on any thread

std::optional<Error> Inbox::why_refused(std::span<const Slice> destinations) const {
  const auto wrong = [&](const std::string& text) {
    return Error(Blame::Caller, "accept from " + who_ + ": " + text);
  };
  if (offer_.load(std::memory_order_acquire) != Offer::Shown)
    return wrong("no message waits to be accepted; accept each once, after it has arrived");
  const auto misfit = frame::why_misfit(
      destinations, sizes_, [this](const Slice& to) -> std::optional<std::string> {
        if (!to.device.is_host()) {
          if (limits_.direct_bytes > 0 && stream_.carries(to)) return std::nullopt;
          return "on " + describe(to.device) +
                 " and this connection moves host memory only; "
                 "stage it (transport/staged/staged_communicator.h)";
        }
        if (to.bytes > 0 && to.data == nullptr) return "without an address";
        return std::nullopt;
      });
  if (misfit) return wrong(*misfit);
  return std::nullopt;
}

Op Inbox::accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept {
  UniqueLock lock(mutex_);
  if (failure_) return Op::failed(*failure_);
  if (auto wrong = why_refused(destinations))
    return Op::failed(std::move(*wrong));  // the message still waits
  const bool must_resume = !in_handler_;   // else the loop looks as soon as the handler returns
  const Op op = take(destinations, std::move(pin), std::move(ready));
  const bool is_whole = offer_.load(std::memory_order_relaxed) == Offer::Copied;
  lock.unlock();
  if (!must_resume) return op;
  // Later messages are not urgent yet, and waking a thread for each message costs processor time.
  if (is_whole) {
    soon_();
  } else {
    again_(Fence());
  }
  return op;
}

Op Inbox::take(std::span<const Slice> destinations, Pin pin, Fence ready) {
  const bool is_here = in_place_.size() == total_;
  if (is_here && (destinations.empty() || total_ == 0 || ready.query())) {
    copy_out(in_place_, destinations);
    offer_.store(Offer::Copied, std::memory_order_release);
    return {};
  }
  destinations_.assign(destinations.begin(), destinations.end());
  ready_ = destinations.empty() ? Fence() : std::move(ready);
  completion_.emplace(std::move(pin), std::make_shared<LoopFlag>(loop_));
  Op op = completion_->op();
  offer_.store(Offer::Taken, std::memory_order_release);
  return op;
}

void Inbox::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return;
  failure_ = why;
  fails_.store(true, std::memory_order_release);
}

// --- reading, on the loop

std::optional<Error> Inbox::pump(const Arrived* arrived) {
  turn_bytes_ = 0;
  // Set as soon as the stream's end is known, before all bytes that arrived earlier are looked at.
  std::optional<Error> end;
  for (;;) {
    Step step = Step::Wait;
    switch (phase_) {
      case Phase::Preamble: step = read_preamble(); break;
      case Phase::Front: step = read_front(arrived); break;
      case Phase::Shown: step = take_up(); break;
      case Phase::Payload: step = read_payload(); break;
    }
    if (step == Step::Wait) return std::nullopt;
    if (step == Step::End) return std::exchange(why_, std::nullopt);
    if (step == Step::NeedBytes) {
      const bool was_last = end.has_value();  // a stream may show bytes that it can no longer move
      if (!end) end = stream_.end();
      if (!end) return std::nullopt;
      if (was_last || stream_.peek(1).empty()) return lost(*end);
    }
    if (turn_bytes_ > kTurnBytes) {
      again_(Fence());
      return std::nullopt;
    }
  }
}

Inbox::Step Inbox::lose(Blame blame, const std::string& text) {
  why_ = Error(blame, "the connection to " + who_ + " is lost: " + text);
  return Step::End;
}

Error Inbox::lost(const Error& why) const {
  const bool is_inside = phase_ == Phase::Payload || gathered_bytes_ > 0;
  return why.within("the connection to " + who_ +
                    (is_inside ? " ended in the middle of a message" : " ended"));
}

Inbox::Bytes Inbox::front(std::size_t wanted) {
  if (gathered_bytes_ == 0) {
    const Bytes seen = stream_.peek(wanted);
    if (seen.size() >= wanted || seen.empty()) return seen;
  }
  // Take out the bytes that have arrived: a stream reports its end only when all have been read.
  if (gathered_.size() < wanted) gathered_.resize(wanted);
  while (gathered_bytes_ < wanted) {
    const std::size_t count =
        stream_.read(std::span(gathered_).first(wanted).subspan(gathered_bytes_));
    if (count == 0) return {};
    gathered_bytes_ += count;
  }
  return Bytes(gathered_).first(wanted);
}

bool Inbox::skip() {
  while (padding_ > 0) {
    const std::size_t count = std::min(stream_.peek(1).size(), padding_);
    if (count == 0) return false;
    stream_.consume(count);
    padding_ -= count;
  }
  return true;
}

Inbox::Step Inbox::read_preamble() {
  const Bytes seen = front(frame::kPreambleBytes);
  const Bytes known = seen.empty() ? Bytes(gathered_).first(gathered_bytes_) : seen;
  if (const auto why = frame::why_stranger(known)) return lose(Blame::Protocol, *why);
  if (seen.empty()) return Step::NeedBytes;
  if (std::exchange(gathered_bytes_, 0) == 0) stream_.consume(frame::kPreambleBytes);
  padding_ = frame::padding(frame::kPreambleBytes, unit_);
  phase_ = Phase::Front;
  return Step::On;
}

Inbox::Step Inbox::read_front(const Arrived* arrived) {
  if (padding_ > 0 && !skip()) return Step::NeedBytes;
  if (!arrived)
    return stream_.peek(1).empty() && gathered_bytes_ == 0 ? Step::NeedBytes : Step::Wait;
  Bytes seen = front(frame::kHeadBytes);
  if (seen.empty()) return Step::NeedBytes;
  const frame::Head head = frame::decode_head(seen);
  if (const auto why = frame::why_refused(head, limits_))
    return lose(Blame::Protocol, "the peer announced a message that exceeds a limit, " + *why);
  const std::size_t said_bytes = head.front_bytes();  // without the zeros up to the payloads
  const std::size_t front_bytes =
      said_bytes + (head.is_goodbye() ? 0 : frame::padding(said_bytes, frame::payload_unit(unit_)));
  if (seen.size() < front_bytes) seen = front(front_bytes);
  if (seen.empty()) return Step::NeedBytes;
  if (head.is_goodbye()) {
    return lose(Blame::PeerLost,
                "the peer closed it: " +
                    frame::text_of(seen.subspan(frame::kHeadBytes, head.header_bytes)));
  }
  const Bytes table = seen.subspan(frame::kHeadBytes, head.payloads * frame::kSizeBytes);
  const auto total = frame::decode_sizes(table, limits_, sizes_);
  if (!total)
    return lose(Blame::Protocol, "the peer announced payloads of more than " +
                                     std::to_string(limits_.max_message) + " bytes");
  // Bytes of the front that the stream shows.
  const std::size_t shown = gathered_bytes_ > 0 ? 0 : front_bytes;
  if (shown == 0) seen = {};
  const Bytes payloads = find_in_place(seen, shown, *total);
  const bool is_worth_waiting =
      *total > 0 && payloads.empty() && shown > 0 && *total <= whole_ - std::min(whole_, shown);
  if (is_worth_waiting && !stream_.end()) return Step::NeedBytes;
  padding_ = frame::padding(front_bytes + *total, unit_);
  const Bytes whole_front =
      shown > 0 ? seen.first(front_bytes) : Bytes(gathered_).first(front_bytes);
  return show(*arrived, whole_front.subspan(said_bytes - head.header_bytes, head.header_bytes),
              payloads, shown, *total);
}

// Returns the payloads if the stream can show all of them behind `shown` bytes of the front.
// `seen`: the bytes that the stream shows, on entry and on return.
Inbox::Bytes Inbox::find_in_place(Bytes& seen, std::size_t shown, std::uint64_t total) {
  const std::size_t window = stream_.window();
  if (total == 0 || shown > window || total > window - shown) return {};
  const std::size_t whole = shown + static_cast<std::size_t>(total);
  if (seen.size() < whole) seen = stream_.peek(whole);
  if (seen.size() >= whole) return seen.subspan(shown, static_cast<std::size_t>(total));
  if (seen.size() < shown) seen = stream_.peek(shown);
  return {};
}

Inbox::Step Inbox::show(const Arrived& arrived, Bytes header, Bytes in_place, std::size_t shown,
                        std::uint64_t total) {
  if (fails_.load(std::memory_order_acquire)) return Step::Wait;
  total_ = total;
  in_place_ = in_place;
  in_handler_ = true;
  offer_.store(Offer::Shown, std::memory_order_release);
  turn_bytes_ += kMessageBytes + in_place.size();
  arrived({header, sizes_, in_place});
  held_ = shown + in_place.size();
  if (in_place.empty() && held_ > 0) stream_.consume(std::exchange(held_, 0));
  gathered_bytes_ = 0;
  phase_ = Phase::Shown;
  return take_up();
}

Inbox::Step Inbox::take_up() {
  if (offer_.load(std::memory_order_acquire) == Offer::Shown) {
    MutexLock lock(mutex_);
    in_handler_ = false;
    if (offer_.load(std::memory_order_relaxed) == Offer::Shown) return Step::Wait;
  }
  if (fails_.load(std::memory_order_acquire)) return Step::Wait;
  const Offer offer = offer_.load(std::memory_order_relaxed);
  offer_.store(Offer::None, std::memory_order_relaxed);
  if (offer == Offer::Taken) {
    phase_ = Phase::Payload;
    index_ = 0;
    offset_ = 0;
    awaited_ = false;
    return Step::On;
  }
  let_go_of_message();
  return Step::On;
}

void Inbox::let_go_of_message() {
  if (const std::size_t held = std::exchange(held_, 0); held > 0) stream_.consume(held);
  in_place_ = {};
  phase_ = Phase::Front;
}

Inbox::Step Inbox::read_payload() {
  if (!ready_.query()) {
    if (!std::exchange(awaited_, true)) again_(ready_);
    return Step::Wait;
  }
  if (!in_place_.empty()) {
    copy_out(in_place_, destinations_);
  } else if (const Step step = destinations_.empty() ? discard() : read_destinations();
             step != Step::Wait) {
    return step;
  }
  let_go_of_message();
  Completion whole = *std::exchange(completion_, std::nullopt);
  ready_ = {};
  whole.finish();
  return Step::On;
}

// Both return Wait when there is nothing left to read.
Inbox::Step Inbox::read_destinations() {
  while (index_ < destinations_.size()) {
    const Slice& to = destinations_[index_];
    if (offset_ == to.bytes) {
      ++index_;
      offset_ = 0;
      continue;
    }
    const auto left =
        to.part(static_cast<std::size_t>(offset_), static_cast<std::size_t>(to.bytes - offset_));
    const std::size_t count = stream_.read({static_cast<std::byte*>(left.data), left.bytes});
    if (count == 0) return Step::NeedBytes;
    offset_ += count;
    turn_bytes_ += count;
    if (turn_bytes_ > kTurnBytes) return Step::On;
  }
  return Step::Wait;
}

Inbox::Step Inbox::discard() {
  while (offset_ < total_) {
    const auto seen = std::min<std::uint64_t>(stream_.peek(1).size(), total_ - offset_);
    if (seen == 0) return Step::NeedBytes;
    stream_.consume(static_cast<std::size_t>(seen));
    offset_ += seen;
    turn_bytes_ += static_cast<std::size_t>(seen);
    if (turn_bytes_ > kTurnBytes) return Step::On;
  }
  return Step::Wait;
}

void Inbox::keep_pins() noexcept {
  MutexLock lock(mutex_);
  if (completion_) completion_->keep_pin();
}

void Inbox::end() noexcept {
  std::optional<Completion> cut;
  std::optional<Error> why;
  {
    MutexLock lock(mutex_);
    cut = std::exchange(completion_, std::nullopt);
    why = failure_;
    offer_.store(Offer::None, std::memory_order_relaxed);
    in_place_ = {};
  }
  if (cut) cut->fail(*why);
}

bool Inbox::drain() noexcept {
  for (std::size_t bytes = 0;;) {
    const std::size_t seen = stream_.peek(1).size();
    if (seen == 0) break;
    stream_.consume(seen);
    bytes += seen;
    if (bytes > kTurnBytes) {
      again_(Fence());
      return false;
    }
  }
  return stream_.end().has_value();
}

}  // namespace weft::transport
