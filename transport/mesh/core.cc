// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/mesh/core.h>

namespace weft::transport::mesh {

namespace {

// After one connection of a peer has ended, the other one may end this much later.
constexpr auto kOtherConnection = std::chrono::seconds(2);
// After the communicator has broken, parts that are being received may take this long to arrive. A
// caller learns of a lost rank only then, and is to know of it within a second.
constexpr auto kLanding = std::chrono::milliseconds(500);

}  // namespace

Core::Core(const JoinOptions& options, std::string backend_name, Chooser with,
           std::shared_ptr<Openings> openings, Layout hosts)
    : rank(options.rank),
      ranks(options.size),
      backend(std::move(backend_name)),
      place(place_of(options, backend)),
      timeout(options.timeout),
      loop(options.loop),
      chooser(std::move(with)),
      layout(std::move(hosts)),
      openings_(std::move(openings)),
      peers_(static_cast<std::size_t>(options.size)),
      closings_(*this, options.max_connections) {}

std::shared_ptr<Operation> Core::fresh_operation() {
  if (idle_.empty()) return std::make_shared<Operation>();
  auto operation = std::move(idle_.back());
  idle_.pop_back();
  operation->is_over = false;
  return operation;
}

void Core::keep(std::shared_ptr<Operation> operation) {
  constexpr std::size_t kKept = 8;
  if (operation.use_count() == 1 && idle_.size() < kKept) idle_.push_back(std::move(operation));
}

std::shared_ptr<HostFlag> Core::flag() const { return std::make_shared<LoopFlag>(loop); }

bool Core::enter() noexcept {
  Turn free = Turn::Free;
  return turn_.compare_exchange_strong(free, Turn::Taken, std::memory_order_acq_rel);
}

void Core::queue(Event event) noexcept {
  {
    MutexLock lock(mutex_);
    waiting_.push_back(std::move(event));
    if (turn_.exchange(Turn::Wanted, std::memory_order_acq_rel) != Turn::Free) return;
  }
  const auto self = shared_from_this();
  leave();  // the thread that handled events has left in between
}

void Core::leave() noexcept {
  // After this many rounds a caller's thread hands the rest to the event loop, so that busy peers
  // cannot keep it from returning.
  constexpr int kTurns = 4;
  for (int turn = 0;; ++turn) {
    Turn taken = Turn::Taken;
    if (turn_.compare_exchange_strong(taken, Turn::Free, std::memory_order_acq_rel)) return;
    if (turn >= kTurns && !loop->inside())
      return loop->post([self = shared_from_this()] { self->leave(); });
    {
      MutexLock lock(mutex_);
      batch_.swap(waiting_);
      turn_.store(Turn::Taken, std::memory_order_relaxed);
    }
    for (Event& event : batch_) std::visit([this](auto& one) { handle(one); }, event);
    batch_.clear();
  }
}

void Core::arrived(int peer, Traffic at, const Arrival& arrival) noexcept {
  auto message = decode(arrival.header, arrival.sizes, ranks);
  if (!message) {
    return post(
        event::Closed{peer, std::nullopt, message.error().within("rank " + std::to_string(peer))});
  }
  const std::uint64_t payload = message.value().payload;
  const bool is_here = payload > 0 && arrival.in_place.size() == payload;
  post(event::Arrived{peer, at, std::move(message).value(),
                      is_here ? arrival.in_place.data() : nullptr});
}

std::string Core::transport_to(int peer) const {
  const std::string name = openings_ && peer != rank ? openings_->transport_to(peer) : "";
  return name.empty() ? backend : name;
}

void Core::expect(int peer, Traffic at, Openings::When when) noexcept {
  Peer& other = peers_[static_cast<std::size_t>(peer)];
  if (connection_of(peer, at) != nullptr || other.lost || !openings_) return;
  other.expected[static_cast<std::size_t>(at)] = true;
  openings_->open(peer, at, when);
}

Op Core::send(int peer, Traffic at, const Header& header, const Slice& payload, Pin pin) noexcept {
  Connection* const connection = connection_of(peer, at);
  const EncodedHeader bytes = encode(header);
  if (connection == nullptr || closings_.holds(peer, at)) {
    Peer& other = peers_[static_cast<std::size_t>(peer)];
    if (other.lost) return Op::failed(*other.lost);
    auto& unsent = other.unsent[static_cast<std::size_t>(at)];
    unsent.push_back({bytes, payload, std::move(pin), Completion(Pin(), flag())});
    return unsent.back().completion.op();
  }
  return closings_.sent(peer, at,
                        connection->send(bytes, {&payload, payload.bytes > 0 ? std::size_t{1} : 0},
                                         std::move(pin), Fence()));
}

Op Core::accept(int peer, Traffic at, const Slice& destination, Pin pin) noexcept {
  return closings_.accepted(
      peer, at,
      connection_of(peer, at)->accept({&destination, destination.bytes > 0 ? std::size_t{1} : 0},
                                      std::move(pin), Fence()));
}

Op Core::discard(int peer, Traffic at) noexcept {
  return closings_.accepted(peer, at, connection_of(peer, at)->accept({}, Pin(), Fence()));
}

void Core::fail(const Error& why) {
  if (!broken_) broken_ = why;
  has_failed_.store(true, std::memory_order_release);
}

void Core::watch(Deadline deadline) {
  if (watching_ || deadline.is_never()) return;
  watching_ = true;
  timer_ = loop->at(deadline, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->post(event::Tick());
  });
}

void Core::on(event::Adopted& event) {
  Peer& peer = peers_[static_cast<std::size_t>(event.peer)];
  const auto at = static_cast<std::size_t>(event.traffic);
  peer.connections[at] = std::move(event.connection);
  if (peer.lost || (buried_ && silent_)) return close(event.peer);
  if (buried_) return tell(event.peer, event.traffic);  // the peer does not know yet
  closings_.opened(event.peer, event.traffic);
  send_unsent(event.peer, event.traffic);
}

void Core::send_unsent(int peer, Traffic traffic) {
  const auto at = static_cast<std::size_t>(traffic);
  for (Unsent& message : std::exchange(peers_[static_cast<std::size_t>(peer)].unsent[at], {})) {
    const Slice& payload = message.payload;
    const Op op = closings_.sent(
        peer, traffic,
        connection_of(peer, traffic)
            ->send(message.header, {&payload, payload.bytes > 0 ? std::size_t{1} : 0},
                   std::move(message.pin), Fence()));
    op.on_ended([op, completion = message.completion]() mutable {
      if (const auto error = op.error()) {
        completion.fail(*error);
      } else {
        completion.finish();
      }
    });
  }
}

void Core::mark_busy(Traffic traffic, std::vector<bool>& busy) const {
  std::fill(busy.begin(), busy.end(), false);
  traffic == Traffic::Collectives ? collectives_.mark_busy(busy) : messages_.mark_busy(busy);
}

void Core::leave(int peer, Traffic traffic) noexcept {
  if (openings_) openings_->leave(peer, traffic);
}

void Core::stay(int peer, Traffic traffic) {
  if (openings_) openings_->stay(peer, traffic);
  send_unsent(peer, traffic);
}

void Core::part(int peer, Traffic traffic) {
  Peer& other = peers_[static_cast<std::size_t>(peer)];
  const auto at = static_cast<std::size_t>(traffic);
  other.connections[at].reset();
  other.expected[at] = false;
  if (!openings_) return;
  openings_->left(peer, traffic);
  std::vector<bool> busy(static_cast<std::size_t>(ranks));
  mark_busy(traffic, busy);
  const bool has_unsent = !other.unsent[at].empty();
  if (!has_unsent && !busy[static_cast<std::size_t>(peer)]) return;
  // As when the operations began, see Collectives::start() and Messages::post().
  const bool connects = traffic == Traffic::Collectives ? rank > peer : has_unsent;
  expect(peer, traffic, connects ? Openings::When::Now : Openings::When::Later);
}

void Core::on(event::Unreachable& event) {
  if (broken_ || lost(event.peer)) return;
  const Blame blame = event.why.blame();
  if (blame != Blame::PeerLost && blame != Blame::Cancelled)
    return fail(event.why.within("no connection with rank " + std::to_string(event.peer))
                    .with_ranks({event.peer}));
  event::Closed closed{event.peer, event.traffic, event.why};
  on(closed);
}

void Core::on(event::Arrived& event) {
  if (broken_) return;  // the connection is not received from any more and ends
  const Type type = event.message.header.type;
  if (type == Type::Failure) return heard_failure(event.peer, event.message);
  if (closings_.arrived(event)) return;
  if ((type == Type::Collective) != (event.traffic == Traffic::Collectives)) {
    return fail(Error(Blame::Protocol, "rank " + std::to_string(event.peer) +
                                           " sent a message on the wrong connection")
                    .with_ranks({event.peer}));
  }
  if (event.traffic == Traffic::Collectives) {
    collectives_.arrived(event.peer, event.message, event.in_place);
  } else {
    messages_.arrived(event.peer, event.message);
  }
}

void Core::heard_failure(int peer, const Message& message) {
  const Blame said = message.header.blame;
  const bool is_shared = said == Blame::Caller || said == Blame::Timeout || said == Blame::Protocol;
  told_by_ = peer;
  // The failure passes from rank to rank; the first that gave up is the one to name.
  constexpr std::string_view kGivenUp = " has given up: ";
  const bool names_first = message.text.find(kGivenUp) != std::string::npos;
  const Error why(is_shared ? said : Blame::PeerLost,
                  names_first
                      ? message.text
                      : "rank " + std::to_string(peer) + std::string(kGivenUp) + message.text);
  // A peer that gives up for a reason of its own, such as an abort, is the one that is lost.
  const bool is_lost = message.about.empty() && !is_shared;
  fail(why.with_ranks(is_lost ? std::vector{peer} : message.about));
}

void Core::on(event::Closed& event) {
  Peer& peer = peers_[static_cast<std::size_t>(event.peer)];
  if (broken_ || peer.lost) return;
  if (event.traffic && !peer.ended && closings_.ended(event.peer, *event.traffic))
    return part(event.peer, *event.traffic);
  const auto is_other = [&](Traffic traffic) {
    const auto at = static_cast<std::size_t>(traffic);
    return traffic != event.traffic && (peer.connections[at] || peer.expected[at]);
  };
  const bool has_other = is_other(Traffic::Collectives) || is_other(Traffic::Messages);
  if (event.traffic && has_other && (!peer.ended || peer.ended == event.traffic)) {
    // Earlier messages on the peer's other connection may still be on their way: a last part, or
    // the reason for the end.
    peer.ended = event.traffic;
    peer.grace = loop->at(Deadline::in(kOtherConnection),
                          [weak = weak_from_this(), peer = event.peer, why = event.why] {
                            if (const auto self = weak.lock())
                              self->post(event::Closed{peer, std::nullopt, why});
                          });
    return;
  }
  peer.grace.reset();
  const bool broke_protocol = event.why.blame() == Blame::Protocol;
  peer.lost = Error(broke_protocol ? Blame::Protocol : Blame::PeerLost,
                    "the connection with rank " + std::to_string(event.peer) +
                        " has ended: " + event.why.text())
                  .with_ranks({event.peer});
  close(event.peer);
  closings_.lost(event.peer);
  collectives_.lost(event.peer);
  if (!broken_) messages_.lost(event.peer);
}

void Core::on(event::Failed& event) {
  if (event.destroyed) {
    silent_ = true;
    if (openings_) openings_->close();
  }
  if (broken_ && event.destroyed) {
    for (int peer = 0; peer < ranks; ++peer) close(peer);
  }
  fail(event.why);
}

void Core::on(event::Told& event) { close(event.peer); }

void Core::on(event::Asked& event) {
  *event.unreceived = messages_.unreceived();
  event.answered->raise();
}

void Core::on(event::Tick&) {
  watching_ = false;
  if (broken_) return let_go();
  const Deadline next = Deadline::sooner(collectives_.deadline(), messages_.deadline());
  if (!next.passed()) return watch(next);
  fail(collectives_.deadline().passed() ? collectives_.why_late() : messages_.why_late());
}

void Core::bury() noexcept {
  buried_ = true;
  timer_.reset();
  watching_ = false;
  collectives_.fail(*broken_);
  messages_.fail(*broken_);
  if (collectives_.is_landing() || messages_.is_landing()) watch(Deadline::in(kLanding));
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    const bool knows = silent_ || peer == told_by_ || peers_[static_cast<std::size_t>(peer)].lost;
    const auto is_usable = [&](Traffic traffic) {
      return connection_of(peer, traffic) != nullptr && !closings_.holds(peer, traffic);
    };
    const Traffic open = is_usable(Traffic::Collectives) ? Traffic::Collectives : Traffic::Messages;
    if (knows || !is_usable(open)) {
      close(peer);
    } else {
      drop_unsent(peer);
      tell(peer, open);
    }
  }
}

// A peer that has stopped in the middle of a part never completes it, and may not hear why.
void Core::let_go() noexcept {
  if (!collectives_.is_landing() && !messages_.is_landing()) return;
  for (int peer = 0; peer < ranks; ++peer) close(peer);
  collectives_.let_go();
  messages_.let_go();
}

void Core::tell(int peer, Traffic traffic) noexcept {
  const Op told = connection_of(peer, traffic)->send(encode_failure(*broken_), {}, Pin(), Fence());
  told.on_ended([weak = weak_from_this(), peer] {
    if (const auto self = weak.lock()) self->post(event::Told{peer});
  });
}

void Core::close(int peer) noexcept {
  const Error why = broken_ ? *broken_ : Error(Blame::Cancelled, "the rank left its group");
  drop_unsent(peer);
  for (auto& connection : peers_[static_cast<std::size_t>(peer)].connections) {
    if (connection) connection->close(why);
  }
}

void Core::drop_unsent(int peer) noexcept {
  Peer& other = peers_[static_cast<std::size_t>(peer)];
  const Error why = other.lost ? *other.lost
                    : broken_  ? *broken_
                               : Error(Blame::Cancelled, "the rank left its group");
  for (auto& unsent : other.unsent) {
    for (Unsent& message : std::exchange(unsent, {})) message.completion.fail(why);
  }
}

}  // namespace weft::transport::mesh
