// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/core.h>
#include <weft/transport/mesh/door.h>

namespace weft::transport::mesh {

namespace {

// Time limit for the hello of an accepted connection.
constexpr auto kHello = std::chrono::seconds(10);
// Strangers that are kept. They leave descriptors for ranks where a process may have 1,024.
constexpr std::size_t kStrangers = 256;
// Connections of each rank for groups that this one has not made yet.
constexpr std::size_t kEarlyOfRank = 8;
// Groups that this rank has left and still knows.
constexpr std::size_t kLeft = 4096;

// Connections that the ranks of such a group may open at once.
std::size_t connections_of(const JoinOptions& options) {
  return static_cast<std::size_t>(options.size) * kConnectionsPerPair;
}

Error not_used() { return {Blame::Cancelled, "the group has ended"}; }

}  // namespace

JoinOptions without_store(JoinOptions options) {
  options.store.reset();
  return options;
}

void receive(Connection& connection, const GuestPointer& guest, std::weak_ptr<Door> door) {
  Connection::Handlers handlers;
  handlers.arrived = [door, guest](const Arrival& arrival) {
    if (guest->greeted) {
      if (const auto live = guest->core.lock()) live->arrived(guest->peer, guest->traffic, arrival);
    } else if (const auto group = guest->openings.lock()) {
      group->greet(guest, arrival);
    } else if (const auto live = door.lock()) {
      live->greet(guest, arrival);
    }
  };
  handlers.closed = [door, guest](const Error& why) {
    if (guest->greeted) {
      if (const auto live = guest->core.lock())
        live->post(event::Closed{guest->peer, guest->traffic, why});
    } else if (const auto group = guest->openings.lock()) {
      group->gone(guest, why);
    } else if (const auto live = door.lock()) {
      live->forget(guest);
    }
  };
  handlers.in_place = true;  // reductions read payloads where the connection received them
  connection.receive(std::move(handlers));
}

void answer_left(Connection& connection, Hello hello) noexcept {
  hello.answer = Answer::Left;
  connection.send(encode(hello), {}, Pin(), Fence());
  connection.close(not_used());
}

Door::Door(std::shared_ptr<Connector> connector, std::string backend, const JoinOptions& options,
           std::string place, Reroute reroute)
    : connector_(std::move(connector)),
      backend_(std::move(backend)),
      options_(without_store(options)),
      place_(std::move(place)),
      reroute_(std::move(reroute)),
      unread_(connections_of(options), kStrangers),
      strangers_(connections_of(options), kStrangers) {}

std::shared_ptr<Door> Door::make(std::shared_ptr<Connector> connector, std::string backend,
                                 const JoinOptions& options, std::string place, Reroute reroute) {
  std::shared_ptr<Door> self(new Door(std::move(connector), std::move(backend), options,
                                      std::move(place), std::move(reroute)));
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

Door::~Door() {
  listener_.reset();
  for (const auto& connection : unread_.take_all()) connection->close(not_used());
  for (const auto& guest : strangers_.take_all()) guest->connection->close(not_used());
  for (const Early& early : early_) early.guest->connection->close(not_used());
}

bool Door::serves(const std::string& backend, const JoinOptions& options) const {
  return backend == backend_ && options.secret == options_.secret && options.loop == options_.loop;
}

void Door::open(const Token& token) {
  std::deque<std::shared_ptr<Connection>> unread;
  {
    MutexLock lock(mutex_);
    token_ = token;
    unread = unread_.take_all();
  }
  for (auto& connection : unread) admit(std::move(connection));
}

Token Door::token() const {
  MutexLock lock(mutex_);
  return token_.value();
}

std::optional<Challenge> Door::challenge(Side own, int listener) const {
  MutexLock lock(mutex_);
  return challenge_of(options_, token_.value(), own, listener);
}

// --- The groups ---

void Door::enter(const Token& group, const std::shared_ptr<Openings>& openings) {
  std::vector<Early> early;
  std::optional<Error> is_short;
  {
    MutexLock lock(mutex_);
    groups_[group] = openings;
    is_short.swap(short_);
    std::erase_if(early_, [&](Early& one) {
      const bool is_meant = one.hello.group == group;
      if (is_meant) early.push_back(std::move(one));
      return is_meant;
    });
  }
  if (is_short) openings->cannot_take_in(*is_short);
  if (early.empty()) return;
  options_.loop->post([self = shared_from_this(), early = std::move(early)] {
    for (const Early& one : early) self->introduce(one.guest, one.hello);
  });
}

void Door::leave(const Token& group) noexcept {
  MutexLock lock(mutex_);
  if (groups_.erase(group) == 0) return;
  left_.push_back(group);
  if (left_.size() > kLeft) left_.pop_front();
}

// --- Taking in ---

void Door::admit(std::shared_ptr<Connection> connection) {
  const auto guest = std::make_shared<Guest>();
  guest->connection = connection;
  std::optional<std::shared_ptr<Connection>> unread;
  std::optional<GuestPointer> silent;
  bool is_open = false;
  {
    MutexLock lock(mutex_);
    short_.reset();  // the shortage is over
    is_open = token_.has_value();
    if (is_open) {
      guest->challenge = challenge_of(options_, *token_, Side::Listener, options_.rank);
      guest->patience = options_.loop->at(
          Deadline::in(kHello), [weak = weak_from_this(), late = std::weak_ptr(guest)] {
            const auto self = weak.lock();
            const auto stranger = late.lock();
            if (self && stranger)
              self->turn_away(stranger, "it sent no hello within " + weft::describe(kHello));
          });
      silent = strangers_.add(guest);
    } else {
      unread = unread_.add(connection);
    }
  }
  if (unread) turn_away(**unread, kTooManyStrangers);
  if (silent) turn_away(*silent, kTooManyStrangers);
  if (is_open) receive(*connection, guest, weak_from_this());
}

void Door::greet(const GuestPointer& guest, const Arrival& arrival) noexcept {
  if (guest->challenge) return challenged(guest, arrival);
  const auto hello = decode_hello(arrival.header);
  if (!hello) return turn_away(guest, hello.error().text());
  if (hello.value().token != token()) return turn_away(guest, "it does not show the group's token");
  introduce(guest, hello.value());
}

// The peer's hello follows when it has proved that it knows the secret.
void Door::challenged(const GuestPointer& guest, const Arrival& arrival) noexcept {
  UniqueLock lock(mutex_);
  const auto connection = guest->connection;
  lock.unlock();
  if (connection == nullptr) return;  // it has been turned away
  if (const auto why = answer_challenge(*guest->challenge, *connection, arrival))
    return turn_away(guest, *why);
  if (guest->challenge->is_proven()) guest->challenge.reset();
  connection->accept({}, Pin(), Fence());
}

// Hands the guest, which has sent this hello, to its group.
void Door::introduce(const GuestPointer& guest, const Hello& hello) noexcept {
  std::shared_ptr<Openings> openings;
  std::shared_ptr<Connection> dropped;
  bool has_left = false;
  {
    MutexLock lock(mutex_);
    if (guest->connection == nullptr) return;  // it has been turned away
    guest->patience.reset();
    strangers_.remove(guest);
    const auto found = groups_.find(hello.group);
    if (found != groups_.end()) openings = found->second.lock();
    has_left = !openings && (found != groups_.end() ||
                             std::find(left_.begin(), left_.end(), hello.group) != left_.end());
    if (has_left) {
      dropped = std::exchange(guest->connection, nullptr);
    } else if (!openings) {
      early_.push_back({guest, hello});
      if (early_.size() <= static_cast<std::size_t>(options_.size) * kEarlyOfRank) return;
      dropped = std::exchange(early_.front().guest->connection, nullptr);
      early_.pop_front();
    }
  }
  if (openings) return openings->arrive(guest, hello);
  if (has_left) return answer_left(*dropped, hello);
  turn_away(*dropped, "too many connections for groups that this rank has not made");
}

void Door::turn_away(const GuestPointer& guest, const std::string& why) noexcept {
  if (const auto connection = forget(guest)) turn_away(*connection, why);
}

void Door::turn_away(Connection& connection, const std::string& why) noexcept {
  warnings_.warn(place_ + ": turned away " + connection.peer() + ": " + why);
  connection.turn_away(Error(Blame::PeerLost, why));
}

std::shared_ptr<Connection> Door::forget(const GuestPointer& guest) noexcept {
  MutexLock lock(mutex_);
  guest->patience.reset();
  strangers_.remove(guest);
  std::erase_if(early_, [&](const Early& one) { return one.guest == guest; });
  return std::exchange(guest->connection, nullptr);
}

void Door::cannot_take_in(const Error& why) noexcept {
  std::vector<std::shared_ptr<Openings>> groups;
  {
    MutexLock lock(mutex_);
    if (groups_.empty()) short_ = why;
    for (const auto& [token, group] : groups_) {
      if (auto live = group.lock()) groups.push_back(std::move(live));
    }
  }
  for (const auto& group : groups) group->cannot_take_in(why);
}

}  // namespace weft::transport::mesh
