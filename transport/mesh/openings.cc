// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/core.h>
#include <weft/transport/mesh/openings.h>

namespace weft::transport::mesh {

namespace {

// How long a rank waits for a peer that is likely to connect, before it connects itself.
constexpr auto kLater = std::chrono::milliseconds(100);
// The same for a peer that has said that it connects (Answer::Crossed).
constexpr auto kCrossed = std::chrono::seconds(1);

std::size_t index_of(int peer, Traffic traffic) {
  return static_cast<std::size_t>(peer) * kConnectionsPerPair + static_cast<std::size_t>(traffic);
}

Error not_used() {
  return {Blame::Cancelled, "the two ranks use another connection, or their group has ended"};
}

}  // namespace

Openings::Openings(std::shared_ptr<Door> door, const Token& group, std::vector<int> members,
                   const JoinOptions& options, const std::string& place)
    : connector_(door->connector()),
      reroute_(door->reroute()),
      group_(group),
      members_(std::move(members)),
      options_(without_store(options)),
      place_(place),
      door_(std::move(door)),
      slots_(index_of(options.size, Traffic())) {}

Openings::~Openings() { close(); }

void Openings::begin(Table table, const std::shared_ptr<Core>& core, Deadline joining) {
  std::shared_ptr<Door> door;
  {
    MutexLock lock(mutex_);
    core_ = core;
    table_ = std::move(table);
    joining_ = joining;
    door = door_;
  }
  if (door) door->enter(group_, shared_from_this());
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
    if (!door_ || slot.state == Slot::State::Open || slot.state == Slot::State::Connects) return;
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
      // The peer's connection has been taken in meanwhile, or this object is closed.
      if (guest == nullptr || !door_) return;
      address = table_.addresses[static_cast<std::size_t>(peer)];
      guest->challenge =
          door_->challenge(Side::Connector, members_[static_cast<std::size_t>(peer)]);
      guest->openings = weak_from_this();
      guest->core = core_;
      // The peers of a part listened when the first group was made.
      const bool is_part = group_ != Token();
      how.has_listened = !joining_ || is_part || slot_of(peer, traffic).has_failed;
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
    expect(guest) ? receive(*connection, guest, {}) : connection->close(not_used());
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
      if (door_) address = table_.addresses[static_cast<std::size_t>(peer)];
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
    hello.group = group_;
    hello.closed = slot_of(peer, traffic).closed;
  }
  hello.rank = static_cast<std::uint32_t>(options_.rank);
  hello.ranks = static_cast<std::uint32_t>(options_.size);
  hello.traffic = traffic;
  hello.answer = answer;
  connection.send(encode(hello), {}, Pin(), Fence());
}

// --- Taking in ---

bool Openings::expect(const GuestPointer& guest) {
  MutexLock lock(mutex_);
  if (guest->connection == nullptr) return false;  // the peer's has been taken in meanwhile
  if (door_) {
    guests_.push_back(guest);
  } else {
    forget(guest);
  }
  return door_ != nullptr;
}

void Openings::greet(const GuestPointer& guest, const Arrival& arrival) noexcept {
  if (guest->challenge) return challenged(guest, arrival);
  const auto hello = decode_hello(arrival.header);
  if (!hello) return turn_away(guest, hello.error().text());
  arrive(guest, hello.value());
}

void Openings::arrive(const GuestPointer& guest, const Hello& hello) noexcept {
  UniqueLock lock(mutex_);
  const auto connection = guest->connection;
  if (connection == nullptr) return;  // it has been dropped
  if (const auto why = why_stranger(*guest, hello)) {
    lock.unlock();
    return turn_away(guest, *why);
  }
  if (guest->is_ours && hello.answer == Answer::Left) {
    lock.unlock();
    return turned_back(guest);
  }
  const bool has_ended = !door_;
  guest->peer = static_cast<int>(hello.rank);
  guest->traffic = hello.traffic;
  guest->closed = hello.closed;
  if (!guest->is_ours && !has_ended) {
    guest->openings = weak_from_this();
    guest->core = core_;
    guests_.push_back(guest);
  }
  lock.unlock();
  if (has_ended) return answer_left(*connection, hello);
  if (hello.answer == Answer::Crossed) return crossed(guest, /*is_told=*/true);
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
    say_hello(*connection, guest->peer, guest->traffic);
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
  if (hello.token != table_.token || hello.group != group_)
    return "it does not show the group's token";
  if (hello.ranks != static_cast<std::uint32_t>(options_.size)) {
    return "it is one of " + std::to_string(hello.ranks) + " ranks, this group has " +
           std::to_string(options_.size);
  }
  const auto rank = static_cast<int>(hello.rank);
  // An answer of this kind repeats this rank's hello.
  if (guest.is_ours && hello.answer == Answer::Left) return std::nullopt;
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

// The peer has left the group.
void Openings::turned_back(const GuestPointer& guest) noexcept {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = forget(guest);
  }
  if (connection == nullptr) return;
  connection->close(not_used());
  unreachable(guest->peer, guest->traffic, Error(Blame::PeerLost, "it has left the group"));
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
    is_joining = joining_.has_value();
  }
  if (!core || (!is_joining && pending().empty())) return;
  core->post(event::Failed{
      Error(Blame::Busy, "cannot accept the connection of a rank: " + why.text()), false});
}

std::shared_ptr<Connection> Openings::forget(const GuestPointer& guest) {
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
  std::shared_ptr<Door> door;
  std::vector<std::shared_ptr<Connection>> left;
  {
    MutexLock lock(mutex_);
    door = std::exchange(door_, nullptr);
    for (Slot& slot : slots_) {
      slot.timer.reset();
      if (slot.ours) slot.ours->is_over = true;
      slot.ours.reset();
    }
    while (!guests_.empty()) left.push_back(forget(GuestPointer(guests_.back())));
  }
  if (door) door->leave(group_);
  for (const auto& connection : left) connection->close(not_used());
}

// --- Queries ---

Table Openings::table() const {
  MutexLock lock(mutex_);
  return table_;
}

std::shared_ptr<Door> Openings::door() const {
  MutexLock lock(mutex_);
  return door_;
}

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
