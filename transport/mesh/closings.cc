// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/make_error.h>
#include <weft/transport/mesh/closings.h>
#include <weft/transport/mesh/core.h>

namespace weft::transport::mesh {

namespace {

// After a look that found nothing to do, the next follows this much later, so that a rank that is
// busy with more connections than it should have does not look after every event.
constexpr auto kPause = std::chrono::milliseconds(10);

}  // namespace

Closings::Closings(Core& core, std::size_t most)
    : core_(core),
      most_(most),
      links_(static_cast<std::size_t>(core.ranks) * kConnectionsPerPair),
      busy_(static_cast<std::size_t>(core.ranks)) {}

// --- The connections and their use ---

void Closings::opened(int peer, Traffic traffic) {
  Link& link = of(peer, traffic);
  link = Link();
  link.state = Link::State::Open;
  link.used = ++clock_;
  ++open_;
}

Op Closings::sent(int peer, Traffic traffic, Op op) {
  Link& link = of(peer, traffic);
  link.used = ++clock_;
  link.used_since = link.asked;
  if (!op.ended()) {
    link.sending = op;
    link.is_awaited = false;
  }
  return op;
}

Op Closings::accepted(int peer, Traffic traffic, Op op) {
  Link& link = of(peer, traffic);
  if (!op.ended()) {
    link.accepting = op;
    link.is_awaited = false;
  }
  return op;
}

bool Closings::ended(int peer, Traffic traffic) {
  if (!holds(peer, traffic)) return false;
  of(peer, traffic) = Link();
  return true;
}

void Closings::lost(int peer) {
  for (const Traffic traffic : kTraffics) {
    Link& link = of(peer, traffic);
    if (link.state == Link::State::Open) --open_;
    if (link.owes_idle) --owed_;
    link = Link();
  }
}

bool Closings::is_still(Link& link) {
  for (Op* const op : {&link.sending, &link.accepting}) {
    if (op->ended()) {
      *op = Op();
      link.is_awaited = false;
      continue;
    }
    if (!std::exchange(link.is_awaited, true)) {
      op->on_ended([weak = core_.weak_from_this()] {
        if (const auto core = weak.lock()) core->post(event::Look());
      });
    }
    return false;
  }
  return true;
}

bool Closings::is_idle(int peer, Traffic traffic) {
  core_.mark_busy(traffic, busy_);
  return !busy_[static_cast<std::size_t>(peer)] && is_still(of(peer, traffic));
}

// --- Asking ---

void Closings::arrange() {
  if (core_.is_broken()) return;
  is_due_ = true;
  const auto look = [weak = core_.weak_from_this()] {
    if (const auto core = weak.lock()) core->post(event::Look());
  };
  if (!was_vain_) return core_.loop->post(look);
  pause_ = core_.loop->at(Deadline::in(kPause), look);
}

void Closings::look() {
  is_due_ = false;
  was_vain_ = true;
  if (core_.is_broken() || (open_ <= most_ && owed_ == 0)) return;
  struct Idle {
    std::uint64_t used;
    int peer;
    Traffic traffic;
  };
  std::vector<Idle> idle;
  std::size_t asked = 0;  // those that are likely to be closed
  for (const Traffic traffic : kTraffics) {
    core_.mark_busy(traffic, busy_);
    for (int peer = 0; peer < core_.ranks; ++peer) {
      Link& link = of(peer, traffic);
      if (link.state != Link::State::Open) continue;
      if (link.asked && !link.used_since) ++asked;
      if (busy_[static_cast<std::size_t>(peer)] || !is_still(link)) continue;
      if (std::exchange(link.owes_idle, false)) {
        --owed_;
        was_vain_ = false;
        say(peer, traffic, ClosingStep::Idle);
      }
      if (!link.asked && !link.is_needed) idle.push_back({link.used, peer, traffic});
    }
  }
  const std::size_t kept = open_ - asked;
  const std::size_t excess = std::min(kept > most_ ? kept - most_ : 0, idle.size());
  std::partial_sort(idle.begin(), idle.begin() + static_cast<std::ptrdiff_t>(excess), idle.end(),
                    [](const Idle& a, const Idle& b) { return a.used < b.used; });
  idle.resize(excess);
  for (const Idle& one : idle) {
    Link& link = of(one.peer, one.traffic);
    link.asked = true;
    link.used_since = false;
    was_vain_ = false;
    say(one.peer, one.traffic, ClosingStep::Ask);
  }
}

void Closings::say(int peer, Traffic traffic, ClosingStep step) {
  Header header;
  header.type = Type::Closing;
  header.number = static_cast<std::uint32_t>(step);
  core_.connection_of(peer, traffic)->send(encode(header), {}, Pin(), Fence());
}

// --- Hearing ---

bool Closings::arrived(const event::Arrived& event) {
  Link& link = of(event.peer, event.traffic);
  if (link.state == Link::State::Ending) return true;  // it is not received from any more
  const Header& header = event.message.header;
  if (header.type == Type::Closing) {
    heard(event.peer, event.traffic, static_cast<ClosingStep>(header.number));
    return true;
  }
  link.used = ++clock_;
  if (link.state == Link::State::Agreed) stays(event.peer, event.traffic);
  return false;
}

void Closings::heard(int peer, Traffic traffic, ClosingStep step) {
  Link& link = of(peer, traffic);
  const bool is_answer = step == ClosingStep::Agree || step == ClosingStep::Refuse;
  const bool is_expected = is_answer                   ? link.asked
                           : step == ClosingStep::Ask  ? link.state == Link::State::Open
                           : step == ClosingStep::Stay ? link.state == Link::State::Agreed
                                                       : link.is_needed;
  if (!is_expected) {
    return core_.fail(Error(Blame::Protocol, "rank " + std::to_string(peer) +
                                                 " sent a step of closing that it may not take: " +
                                                 std::to_string(static_cast<int>(step)))
                          .with_ranks({peer}));
  }
  core_.discard(peer, traffic);
  switch (step) {
    case ClosingStep::Ask: return heard_ask(peer, traffic);
    case ClosingStep::Agree: return heard_agree(peer, traffic);
    case ClosingStep::Refuse:
      link.asked = false;
      link.is_needed = true;
      return;
    case ClosingStep::Stay: return stays(peer, traffic);
    case ClosingStep::Idle: link.is_needed = false; return;
  }
}

void Closings::heard_ask(int peer, Traffic traffic) {
  Link& link = of(peer, traffic);
  const bool asks_too = link.asked && !link.used_since && core_.rank > peer;
  if (asks_too || !is_idle(peer, traffic)) {
    if (!std::exchange(link.owes_idle, true)) ++owed_;
    return say(peer, traffic, ClosingStep::Refuse);
  }
  if (std::exchange(link.owes_idle, false)) --owed_;
  link.state = Link::State::Agreed;
  --open_;
  core_.leave(peer, traffic);
  say(peer, traffic, ClosingStep::Agree);
}

void Closings::heard_agree(int peer, Traffic traffic) {
  Link& link = of(peer, traffic);
  link.asked = false;
  // The peer has read, or will read, what was sent since, and then goes on.
  if (link.used_since) return;
  if (!is_idle(peer, traffic)) return say(peer, traffic, ClosingStep::Stay);
  if (std::exchange(link.owes_idle, false)) --owed_;
  link.state = Link::State::Ending;
  --open_;
  core_.leave(peer, traffic);
  core_.connection_of(peer, traffic)
      ->close(
          Error(Blame::Cancelled, "the connection was idle, and both ranks agreed to close it"));
}

void Closings::stays(int peer, Traffic traffic) {
  of(peer, traffic).state = Link::State::Open;
  ++open_;
  core_.stay(peer, traffic);
}

// --- The part of Openings ---

void Openings::leave(int peer, Traffic traffic) noexcept {
  MutexLock lock(mutex_);
  Slot& slot = slot_of(peer, traffic);
  slot.state = Slot::State::Leaves;
  slot.asks.reset();
}

void Openings::stay(int peer, Traffic traffic) noexcept {
  MutexLock lock(mutex_);
  slot_of(peer, traffic).state = Slot::State::Open;
}

void Openings::drop(const GuestPointer& guest) noexcept {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = forget(guest);
  }
  if (connection)
    connection->close(Error(Blame::Cancelled, "the two ranks use another connection"));
}

// On the loop, so that the end of the connection that is taken in is not told meanwhile.
void Openings::left(int peer, Traffic traffic) noexcept {
  options_.loop->post([weak = weak_from_this(), peer, traffic] {
    if (const auto self = weak.lock()) self->replace(peer, traffic);
  });
}

void Openings::replace(int peer, Traffic traffic) noexcept {
  GuestPointer next;
  std::shared_ptr<Connection> connection;
  std::optional<When> asks;
  {
    MutexLock lock(mutex_);
    Slot& slot = slot_of(peer, traffic);
    if (!door_ || slot.state != Slot::State::Leaves) return;
    slot.state = Slot::State::Closed;
    ++slot.closed;
    next = std::exchange(slot.next, nullptr);
    asks = std::exchange(slot.asks, std::nullopt);
    if (next) connection = next->connection;
  }
  if (connection) return take_in(next, connection);
  if (asks) open(peer, traffic, *asks);
}

}  // namespace weft::transport::mesh
