// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/core.h>
#include <weft/transport/mesh/openings.h>

namespace weft::transport::mesh {

namespace {

// Time limit for the hello of an accepted connection.
constexpr auto kHello = std::chrono::seconds(10);
// How long a rank waits for a peer that is likely to connect, before it connects itself.
constexpr auto kLater = std::chrono::milliseconds(100);
// The same for a peer that has said that it connects (Answer::Crossed).
constexpr auto kCrossed = std::chrono::seconds(1);
// Connections without a hello that may be open at once, beside those of the ranks.
constexpr std::size_t kStrangers = 256;
constexpr const char* kTooMany = "too many connections without a hello";

std::size_t index_of(int peer, Traffic traffic) {
  return static_cast<std::size_t>(peer) * kConnectionsPerPair + static_cast<std::size_t>(traffic);
}

// A store may count its holders, and end with the last.
JoinOptions without_store(JoinOptions options) {
  options.store.reset();
  return options;
}

Error not_used() {
  return {Blame::Cancelled, "the two ranks use another connection, or their group has ended"};
}

}  // namespace

Openings::Openings(std::shared_ptr<Connector> connector, const JoinOptions& options,
                   const std::string& place, Reroute reroute)
    : connector_(std::move(connector)),
      options_(without_store(options)),
      place_(place),
      reroute_(std::move(reroute)),
      slots_(index_of(options.size, Traffic())) {}

std::shared_ptr<Openings> Openings::make(std::shared_ptr<Connector> connector,
                                         const JoinOptions& options, const std::string& place,
                                         Reroute reroute) {
  std::shared_ptr<Openings> self(
      new Openings(std::move(connector), options, place, std::move(reroute)));
  const auto accepted = [weak = self->weak_from_this()](std::shared_ptr<Connection> connection) {
    const auto live = weak.lock();
    if (!live) return connection->close(Error(Blame::Cancelled, "the listener was closed"));
    live->admit(std::move(connection));
  };
  self->listener_ = self->connector_->listen(
      {.loop = options.loop,
       .interface_address = options.interface_address,
       .accepted = accepted,
       .short_of_something = [weak = self->weak_from_this()](const Error& why) {
         if (const auto live = weak.lock()) live->cannot_take_in(why);
       }});
  return self;
}

Openings::~Openings() { close(); }

void Openings::begin(Table table, const std::shared_ptr<Core>& core, Deadline joining) {
  std::deque<std::shared_ptr<Connection>> early;
  std::optional<Error> is_short;
  {
    MutexLock lock(mutex_);
    has_begun_ = true;
    core_ = core;
    table_ = std::move(table);
    joining_ = joining;
    early.swap(early_);
    is_short.swap(short_);
  }
  if (is_short) cannot_take_in(*is_short);
  for (auto& connection : early) admit(std::move(connection));
}

void Openings::joined() {
  MutexLock lock(mutex_);
  joining_.reset();
}

Openings::Slot& Openings::slot_of(int peer, Traffic traffic) {
  return slots_[index_of(peer, traffic)];
}

// --- Opening ---

void Openings::open(int peer, Traffic traffic, When when) noexcept {
  try {
    MutexLock lock(mutex_);
    Slot& slot = slot_of(peer, traffic);
    if (closed_ || slot.state == Slot::State::Open || slot.state == Slot::State::Connects) return;
    if (slot.state == Slot::State::Leaves) {
      if (slot.asks != When::Now) slot.asks = when;
      return;
    }
    if (when == When::Later) {
      if (slot.state == Slot::State::Closed) wait_for(peer, traffic, kLater);
      return;
    }
    slot.timer.reset();
    slot.state = Slot::State::Connects;
    slot.ours = std::make_shared<Guest>();
    slot.ours->peer = peer;
    slot.ours->traffic = traffic;
    slot.ours->is_ours = true;
  } catch (...) {
    return unreachable(peer, traffic, to_error(std::current_exception(), Blame::Busy));
  }
  connect(peer, traffic);
}

void Openings::wait_for(int peer, Traffic traffic, std::chrono::milliseconds time) {
  Slot& slot = slot_of(peer, traffic);
  slot.state = Slot::State::Waits;
  slot.timer = options_.loop->at(Deadline::in(time), [weak = weak_from_this(), peer, traffic] {
    if (const auto self = weak.lock()) self->open(peer, traffic, When::Now);
  });
}

void Openings::connect(int peer, Traffic traffic) noexcept {
  try {
    std::string address;
    GuestPointer guest;
    ConnectOptions how{.loop = options_.loop};
    {
      MutexLock lock(mutex_);
      guest = slot_of(peer, traffic).ours;
      if (guest == nullptr) return;  // the peer's connection has been taken in meanwhile
      address = table_.addresses[static_cast<std::size_t>(peer)];
      guest->challenge = challenge_of(options_, table_, Side::Connector, peer);
      how.has_listened = !joining_ || slot_of(peer, traffic).has_failed;
      how.deadline = joining_ ? *joining_ : Deadline::in(options_.timeout);
    }
    const auto connection = connector_->connect(address, how);
    bool is_over = false;
    {
      MutexLock lock(mutex_);
      is_over = guest->is_over;
      if (!is_over) guest->connection = connection;
    }
    if (is_over) return connection->close(not_used());
    guest->challenge ? send_opening(*guest->challenge, *connection)
                     : say_hello(*connection, peer, traffic);
    receive(guest);
  } catch (...) {
    {
      MutexLock lock(mutex_);
      if (const auto guest = slot_of(peer, traffic).ours) forget(guest);
    }
    failed(peer, traffic, {}, to_error(std::current_exception(), Blame::Busy));
  }
}

void Openings::failed(int peer, Traffic traffic, const std::string& transport,
                      const Error& why) noexcept {
  try {
    std::string address;
    {
      MutexLock lock(mutex_);
      if (!closed_) address = table_.addresses[static_cast<std::size_t>(peer)];
    }
    const std::string used = transport.empty() ? connector_->transport_to(address) : transport;
    if (address.empty() || !reroute_ || why.blame() != Blame::PeerLost ||
        !reroute_(address, used, why))
      return unreachable(peer, traffic, why);
    {
      MutexLock lock(mutex_);
      slot_of(peer, traffic).has_failed = true;
    }
    open(peer, traffic, When::Now);
  } catch (...) {
    unreachable(peer, traffic, to_error(std::current_exception(), Blame::Busy));
  }
}

void Openings::unreachable(int peer, Traffic traffic, const Error& why) noexcept {
  std::shared_ptr<Core> core;
  {
    MutexLock lock(mutex_);
    core = core_.lock();
  }
  if (core) core->post(event::Unreachable{peer, traffic, why});
}

void Openings::say_hello(Connection& connection, int peer, Traffic traffic, Answer answer) {
  Hello hello;
  {
    MutexLock lock(mutex_);
    hello.token = table_.token;
    hello.closed = slot_of(peer, traffic).closed;
  }
  hello.rank = static_cast<std::uint32_t>(options_.rank);
  hello.ranks = static_cast<std::uint32_t>(options_.size);
  hello.traffic = traffic;
  hello.answer = answer;
  connection.send(encode(hello), {}, Pin(), Fence());
}

// --- Taking in ---

void Openings::admit(std::shared_ptr<Connection> connection) {
  const auto guest = std::make_shared<Guest>();
  guest->connection = std::move(connection);
  GuestPointer oldest;
  {
    MutexLock lock(mutex_);
    if (!has_begun_ && !closed_) {
      early_.push_back(std::move(guest->connection));
      if (early_.size() > kStrangers + slots_.size()) {
        log::warn(place_ + ": turned away " + early_.front()->peer() + ": " + kTooMany);
        early_.front()->close(Error(Blame::PeerLost, kTooMany));
        early_.pop_front();
      }
      return;
    }
    guest->challenge = challenge_of(options_, table_, Side::Listener, options_.rank);
    guest->patience = options_.loop->at(
        Deadline::in(kHello), [weak = weak_from_this(), late = std::weak_ptr(guest)] {
          const auto self = weak.lock();
          const auto stranger = late.lock();
          if (self && stranger)
            self->turn_away(stranger, "it sent no hello within " + weft::describe(kHello));
        });
    if (guests_.size() >= kStrangers + slots_.size()) {
      const auto found = std::find_if(guests_.begin(), guests_.end(),
                                      [](const auto& one) { return !one->is_ours; });
      if (found != guests_.end()) oldest = *found;
    }
  }
  // The connection that has been silent longest is hardly a rank's.
  if (oldest) turn_away(oldest, kTooMany);
  receive(guest);
}

void Openings::receive(const GuestPointer& guest) {
  std::shared_ptr<Connection> connection;
  std::weak_ptr<Core> owner;
  bool is_over = false;
  {
    MutexLock lock(mutex_);
    connection = guest->connection;
    if (connection == nullptr) return;
    owner = core_;
    is_over = closed_;
    is_over ? static_cast<void>(forget(guest)) : guests_.push_back(guest);
  }
  if (is_over) return connection->close(not_used());
  Connection::Handlers handlers;
  handlers.arrived = [openings = weak_from_this(), core = owner, guest](const Arrival& arrival) {
    if (guest->greeted) {
      if (const auto live = core.lock()) live->arrived(guest->peer, guest->traffic, arrival);
    } else if (const auto live = openings.lock()) {
      live->greet(guest, arrival);
    }
  };
  handlers.closed = [openings = weak_from_this(), core = owner, guest](const Error& why) {
    if (guest->greeted) {
      if (const auto live = core.lock())
        live->post(event::Closed{guest->peer, guest->traffic, why});
    } else if (const auto live = openings.lock()) {
      live->gone(guest, why);
    }
  };
  handlers.in_place = true;  // reductions read payloads where the connection received them
  connection->receive(std::move(handlers));
}

void Openings::greet(const GuestPointer& guest, const Arrival& arrival) noexcept {
  if (guest->challenge) return challenged(guest, arrival);
  const auto hello = decode_hello(arrival.header);
  if (!hello) return turn_away(guest, hello.error().text());
  UniqueLock lock(mutex_);
  const auto connection = guest->connection;
  if (connection == nullptr) return;  // it has been dropped
  if (const auto why = why_stranger(*guest, hello.value())) {
    lock.unlock();
    return turn_away(guest, *why);
  }
  guest->peer = static_cast<int>(hello.value().rank);
  guest->traffic = hello.value().traffic;
  guest->closed = hello.value().closed;
  lock.unlock();
  if (hello.value().answer == Answer::Crossed) return crossed(guest, /*is_told=*/true);
  take_in(guest, connection);
}

// The peer's hello follows when it has proved that it knows the secret.
void Openings::challenged(const GuestPointer& guest, const Arrival& arrival) noexcept {
  UniqueLock lock(mutex_);
  const auto connection = guest->connection;
  lock.unlock();
  if (connection == nullptr) return;  // it has been dropped
  if (const auto why = answer_challenge(*guest->challenge, *connection, arrival))
    return turn_away(guest, *why);
  if (guest->challenge->is_proven()) {
    guest->challenge.reset();
    if (guest->is_ours) say_hello(*connection, guest->peer, guest->traffic);
  }
  connection->accept({}, Pin(), Fence());
}

void Openings::take_in(const GuestPointer& guest,
                       const std::shared_ptr<Connection>& connection) noexcept {
  std::shared_ptr<Connection> dropped;
  UniqueLock lock(mutex_);
  Slot& slot = slot_of(guest->peer, guest->traffic);
  const bool leaves = slot.state == Slot::State::Leaves;
  if (slot.next || (!guest->is_ours && guest->closed != slot.closed + (leaves ? 1 : 0))) {
    lock.unlock();
    return drop(guest);
  }
  if (leaves) {
    guest->patience.reset();  // it has said hello
    slot.next = guest;
    return;
  }
  const bool is_refused = !guest->is_ours && guest->peer < options_.rank &&
                          (slot.state == Slot::State::Connects || slot.state == Slot::State::Open);
  if (is_refused) {
    lock.unlock();
    return crossed(guest, /*is_told=*/false);
  }
  slot.timer.reset();
  slot.state = Slot::State::Open;
  slot.transport = connection->transport();
  if (const auto ours = std::exchange(slot.ours, nullptr); ours && ours != guest) {
    ours->is_over = true;
    dropped = forget(ours);
  }
  forget(guest);
  const auto core = core_.lock();
  lock.unlock();
  guest->greeted = true;
  if (!guest->is_ours) say_hello(*connection, guest->peer, guest->traffic);
  if (core) core->post(event::Adopted{guest->peer, guest->traffic, connection});
  connection->accept({}, Pin(), Fence());
  if (dropped) dropped->close(not_used());
}

// Ends one of two connections between two ranks that have connected to each other at once.
// `is_told`: the peer refuses it; otherwise this rank does.
void Openings::crossed(const GuestPointer& guest, bool is_told) noexcept {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    const bool is_awaited = slot_of(guest->peer, guest->traffic).ours == guest;
    connection = forget(guest);
    if (is_awaited) wait_for(guest->peer, guest->traffic, kCrossed);
  }
  if (connection == nullptr) return;
  if (!is_told) say_hello(*connection, guest->peer, guest->traffic, Answer::Crossed);
  connection->close(not_used());
}

std::optional<std::string> Openings::why_stranger(const Guest& guest, const Hello& hello) {
  if (hello.token != table_.token) return "it does not show the group's token";
  if (hello.ranks != static_cast<std::uint32_t>(options_.size)) {
    return "it is one of " + std::to_string(hello.ranks) + " ranks, this group has " +
           std::to_string(options_.size);
  }
  const auto rank = static_cast<int>(hello.rank);
  if (guest.is_ours && (rank != guest.peer || hello.traffic != guest.traffic)) {
    return "it is not the rank that this one connected to: it says rank " + std::to_string(rank);
  }
  if (guest.is_ours) return std::nullopt;
  if (rank == options_.rank || hello.answer != Answer::Takes)
    return "rank " + std::to_string(rank) + " does not connect here";
  const Slot& slot = slot_of(rank, hello.traffic);
  if (rank > options_.rank && slot.state == Slot::State::Open && hello.closed == slot.closed)
    return "rank " + std::to_string(rank) + " has already connected";
  return std::nullopt;
}

void Openings::turn_away(const GuestPointer& guest, const std::string& why) {
  UniqueLock lock(mutex_);
  const auto connection = forget(guest);
  if (connection == nullptr) return;
  lock.unlock();
  log::warn(place_ + ": turned away " + connection->peer() + ": " + why);
  connection->close(Error(Blame::PeerLost, why));
  if (!guest->is_ours) return;
  unreachable(guest->peer, guest->traffic,
              Error(Blame::PeerLost, "another program answers at its address: " + why));
}

// A connection ended before its hello.
void Openings::gone(const GuestPointer& guest, const Error& why) noexcept {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = forget(guest);
  }
  if (connection == nullptr || !guest->is_ours) return;
  failed(guest->peer, guest->traffic, std::string(connection->transport()), why);
}

// A peer that connects waits for an answer until its deadline. At the process's own limit of
// descriptors (EMFILE), a rank that needs the connection as well fails at once, because none will
// become free before then.
void Openings::cannot_take_in(const Error& why) noexcept {
  if (why.native_code() != EMFILE) return;
  std::shared_ptr<Core> core;
  bool is_joining = false;
  {
    MutexLock lock(mutex_);
    core = core_.lock();
    if (!has_begun_) short_ = why;
    is_joining = joining_.has_value();
  }
  if (!core || (!is_joining && pending().empty())) return;
  core->post(event::Failed{
      Error(Blame::Busy, "cannot accept the connection of a rank: " + why.text()), false});
}

std::shared_ptr<Connection> Openings::forget(const GuestPointer& guest) {
  guest->patience.reset();
  std::erase(guests_, guest);
  if (guest->peer >= 0 && slot_of(guest->peer, guest->traffic).next == guest)
    slot_of(guest->peer, guest->traffic).next.reset();
  if (guest->is_ours && slot_of(guest->peer, guest->traffic).ours == guest) {
    slot_of(guest->peer, guest->traffic).ours.reset();
    slot_of(guest->peer, guest->traffic).state = Slot::State::Closed;
  }
  return std::exchange(guest->connection, nullptr);
}

void Openings::close() noexcept {
  std::unique_ptr<Listener> listener;
  std::vector<std::shared_ptr<Connection>> left;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    listener = std::move(listener_);
    left.assign(early_.begin(), early_.end());
    early_.clear();
    for (Slot& slot : slots_) {
      slot.timer.reset();
      if (slot.ours) slot.ours->is_over = true;
      slot.ours.reset();
    }
    while (!guests_.empty()) left.push_back(forget(GuestPointer(guests_.back())));
  }
  for (const auto& connection : left) connection->close(not_used());
}

// --- Queries ---

std::string Openings::transport_to(int peer) const {
  std::string address;
  {
    MutexLock lock(mutex_);
    for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) {
      const std::string& transport = slots_[index_of(peer, traffic)].transport;
      if (!transport.empty()) return transport;
    }
    address = table_.addresses[static_cast<std::size_t>(peer)];
  }
  return connector_->transport_to(address);
}

std::vector<int> Openings::pending() const {
  std::vector<int> peers;
  MutexLock lock(mutex_);
  for (std::size_t at = 0; at < slots_.size(); ++at) {
    const Slot::State state = slots_[at].state;
    const int peer = static_cast<int>(at) / kConnectionsPerPair;
    const bool is_pending = state == Slot::State::Waits || state == Slot::State::Connects;
    if (is_pending && (peers.empty() || peers.back() != peer)) peers.push_back(peer);
  }
  return peers;
}

}  // namespace weft::transport::mesh
