// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/random.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/mesh/meeting.h>

namespace weft::transport::mesh {

namespace {

// Time limit for the hello of an accepted connection.
constexpr auto kHello = std::chrono::seconds(10);
// Extra time in which a late connection may report its reason.
constexpr auto kReason = std::chrono::milliseconds(200);
// Connections without a hello that may be open at once, beside those of the ranks.
constexpr std::size_t kStrangers = 256;
constexpr const char* kSecretKey = "mesh/secret";
std::string address_key(int rank) { return "mesh/address/" + std::to_string(rank); }

Secret random_secret() {
  Secret secret;
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    throw system_error(Blame::Busy, "no random numbers for the group's secret", errno);
  }
  return secret;
}

Bootstrap::Bytes bytes_of(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

std::size_t place_of(int peer, Traffic traffic) {
  return static_cast<std::size_t>(peer) * kConnectionsPerPair + static_cast<std::size_t>(traffic);
}

}  // namespace

Meeting::Meeting(Connector& connector, const JoinOptions& options, std::shared_ptr<Core> core)
    : connector_(connector),
      options_(options),
      core_(std::move(core)),
      place_("joining " + core_->place),
      over_(std::make_shared<LoopFlag>(options.loop)),
      established_(place_of(options.size, Traffic())),
      missing_(place_of(options.size - 1, Traffic())) {}

void Meeting::hold(Deadline deadline) {
  if (options_.size == 1) return;
  const auto accepted = [weak = weak_from_this()](std::shared_ptr<Connection> connection) {
    const auto self = weak.lock();
    if (!self) return connection->close(Error(Blame::Cancelled, "the listener was closed"));
    self->admit(std::move(connection));
  };
  const auto listener =
      connector_.listen({.loop = options_.loop,
                         .interface_address = options_.interface_address,
                         .accepted = accepted,
                         .short_of_something = [weak = weak_from_this()](const Error& why) {
                           if (const auto self = weak.lock()) self->cannot_take_in(why);
                         }});
  try {
    publish(listener->address(), deadline);
    for (int peer = 0; peer < options_.rank; ++peer) connect(peer, deadline);
  } catch (const Error& error) {
    if (error.blame() == Blame::Timeout) throw why_late();
    throw error.within(place_);
  }
  if (!over_->synchronize(deadline) && is_connecting())
    static_cast<void>(over_->synchronize(Deadline::in(kReason)));
  UniqueLock lock(mutex_);
  if (failure_) throw *failure_;
  const bool all_came = missing_ == 0;
  lock.unlock();
  if (!all_came) throw why_late();
}

void Meeting::publish(const std::string& address, Deadline deadline) {
  Secret secret;
  if (options_.rank == 0) {
    secret = random_secret();
    options_.store->set(kSecretKey, {secret.begin(), secret.end()});
  } else {
    const auto bytes = options_.store->get(kSecretKey, deadline);
    if (bytes.size() != secret.size())
      throw Error(Blame::PeerLost,
                  "the store has no valid group secret; run the same version of Weft on all ranks");
    std::copy(bytes.begin(), bytes.end(), secret.begin());
  }
  {
    MutexLock lock(mutex_);
    secret_ = secret;
  }
  // No rank can connect to this one before its address is published.
  options_.store->set(address_key(options_.rank), bytes_of(address));
}

void Meeting::connect(int peer, Deadline deadline) {
  const auto bytes = options_.store->get(address_key(peer), deadline);
  const std::string address(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) {
    auto guest = std::make_shared<Guest>();
    guest->peer = peer;
    guest->traffic = traffic;
    guest->is_ours = true;
    guest->connection = connector_.connect(address, {.loop = options_.loop, .deadline = deadline});
    say_hello(*guest->connection, traffic);
    receive(guest);
  }
}

void Meeting::say_hello(Connection& connection, Traffic traffic) {
  Hello hello;
  {
    MutexLock lock(mutex_);
    hello.secret = secret_;
  }
  hello.rank = static_cast<std::uint32_t>(options_.rank);
  hello.ranks = static_cast<std::uint32_t>(options_.size);
  hello.traffic = traffic;
  connection.send(encode(hello), {}, Pin(), Fence());
}

void Meeting::admit(std::shared_ptr<Connection> connection) {
  const auto guest = std::make_shared<Guest>();
  guest->connection = std::move(connection);
  guest->patience = options_.loop->at(
      Deadline::in(kHello), [weak = weak_from_this(), late = std::weak_ptr(guest)] {
        const auto self = weak.lock();
        const auto stranger = late.lock();
        if (self && stranger)
          self->turn_away(stranger, "it sent no hello within " + weft::describe(kHello));
      });
  GuestPointer oldest;
  {
    MutexLock lock(mutex_);
    if (guests_.size() >= kStrangers + established_.size()) {
      const auto found = std::find_if(guests_.begin(), guests_.end(),
                                      [](const auto& one) { return !one->is_ours; });
      if (found != guests_.end()) oldest = *found;
    }
  }
  // The connection that has been silent longest is hardly a rank's.
  if (oldest) turn_away(oldest, "too many connections without a hello");
  receive(guest);
}

void Meeting::receive(const GuestPointer& guest) {
  const auto connection = guest->connection;
  {
    MutexLock lock(mutex_);
    guests_.push_back(guest);
  }
  Connection::Handlers handlers;
  handlers.arrived = [meeting = weak_from_this(), core = std::weak_ptr(core_),
                      guest](const Arrival& arrival) {
    if (guest->greeted) {
      if (const auto live = core.lock()) live->arrived(guest->peer, guest->traffic, arrival);
    } else if (const auto live = meeting.lock()) {
      live->greet(guest, arrival);
    }
  };
  handlers.closed = [meeting = weak_from_this(), core = std::weak_ptr(core_),
                     guest](const Error& why) {
    if (guest->greeted) {
      if (const auto live = core.lock())
        live->post(event::Closed{guest->peer, guest->traffic, why});
    } else if (const auto live = meeting.lock()) {
      live->gone(guest, why);
    }
  };
  handlers.in_place = true;  // reductions read payloads where the connection received them
  connection->receive(std::move(handlers));
}

void Meeting::greet(const GuestPointer& guest, const Arrival& arrival) noexcept {
  const auto hello = decode_hello(arrival.header);
  if (!hello) return turn_away(guest, hello.error().text());
  UniqueLock lock(mutex_);
  const auto connection = guest->connection;
  if (connection == nullptr) return;  // the meeting is over
  if (const auto why = why_stranger(*guest, hello.value())) {
    lock.unlock();
    return turn_away(guest, *why);
  }
  guest->peer = static_cast<int>(hello.value().rank);
  guest->traffic = hello.value().traffic;
  guest->greeted = true;
  established_[place_of(guest->peer, guest->traffic)] = true;
  const bool is_last = --missing_ == 0;
  forget(guest);
  lock.unlock();
  if (!guest->is_ours) say_hello(*connection, guest->traffic);
  core_->post(event::Adopted{guest->peer, guest->traffic, connection});
  connection->accept({}, Pin(), Fence());
  if (is_last) over_->raise();
}

void Meeting::turn_away(const GuestPointer& guest, const std::string& why) {
  UniqueLock lock(mutex_);
  const auto connection = forget(guest);
  if (connection == nullptr) return;
  if (guest->is_ours && !failure_) {
    failure_ =
        Error(Blame::PeerLost, "at the address of rank " + std::to_string(guest->peer) + ": " + why)
            .within(place_)
            .with_ranks({guest->peer});
  }
  lock.unlock();
  log::warn(place_ + ": turned away " + connection->peer() + ": " + why);
  connection->close(Error(Blame::PeerLost, why));
  if (guest->is_ours) over_->raise();
}

// A connection ended before its hello.
void Meeting::gone(const GuestPointer& guest, const Error& why) noexcept {
  {
    MutexLock lock(mutex_);
    if (forget(guest) == nullptr || !guest->is_ours) return;
    if (why.blame() == Blame::Timeout) {
      late_ = why.text();
    } else if (!failure_) {
      // Busy: this rank lacks memory or descriptors.
      const bool is_own = why.blame() == Blame::Busy || why.blame() == Blame::Protocol;
      const Blame blame = is_own ? why.blame() : Blame::PeerLost;
      failure_ =
          Error(blame, "no connection with rank " + std::to_string(guest->peer) + ": " + why.text())
              .within(place_)
              .with_ranks({guest->peer});
    }
  }
  over_->raise();
}

// Another rank waits for an answer until its deadline. At the process's own limit of descriptors
// (EMFILE) joining fails at once, because none will become free before then.
void Meeting::cannot_take_in(const Error& why) noexcept {
  {
    MutexLock lock(mutex_);
    if (why.native_code() != EMFILE) {
      late_ = why.text();
      return;
    }
    if (!failure_)
      failure_ = Error(Blame::Busy, "cannot accept the connection of a rank: " + why.text())
                     .within(place_);
  }
  over_->raise();
}

bool Meeting::is_connecting() {
  MutexLock lock(mutex_);
  return std::any_of(guests_.begin(), guests_.end(), [](const auto& one) { return one->is_ours; });
}

std::shared_ptr<Connection> Meeting::forget(const GuestPointer& guest) {
  guest->patience.reset();
  std::erase(guests_, guest);
  return std::exchange(guest->connection, nullptr);
}

void Meeting::close() {
  std::vector<std::shared_ptr<Connection>> left;
  {
    MutexLock lock(mutex_);
    while (!guests_.empty()) left.push_back(forget(GuestPointer(guests_.back())));
  }
  for (const auto& connection : left)
    connection->close(Error(Blame::Cancelled, "joining ended without this connection"));
}

void Meeting::tidy() noexcept {
  if (options_.rank != 0 || options_.size == 1) return;
  try {
    options_.store->erase(kSecretKey);
    for (int rank = 0; rank < options_.size; ++rank) options_.store->erase(address_key(rank));
  } catch (const std::exception& error) {
    log::debug(place_ + ": the store was already closed: " + error.what());
  }
}

Error Meeting::why_late() {
  std::vector<int> absent, unconnected;
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == options_.rank) continue;
    UniqueLock lock(mutex_);
    if (established_[place_of(peer, Traffic::Collectives)] &&
        established_[place_of(peer, Traffic::Messages)])
      continue;
    lock.unlock();
    bool came = false;
    try {
      came = options_.store->exists(address_key(peer));
    } catch (const std::exception&) {  // a closed store tells nothing about the rank
    }
    (came ? unconnected : absent).push_back(peer);
  }
  const std::string what = absent.empty() ? "no connection with " + ranks_text(unconnected)
                                          : "missing: " + ranks_text(absent);
  MutexLock lock(mutex_);
  return Error(Blame::Timeout, place_ + ": not all ranks joined within " +
                                   weft::describe(options_.timeout) + "; " + what +
                                   (absent.empty() && !late_.empty() ? ": " + late_ : ""))
      .with_ranks(absent.empty() ? unconnected : absent);
}

std::optional<std::string> Meeting::why_stranger(const Guest& guest, const Hello& hello) const {
  // While secret_ is unset no peer can know it, as this rank publishes its address only afterwards.
  if (secret_ == Secret() || hello.secret != secret_) return "it does not know the group's secret";
  if (hello.ranks != static_cast<std::uint32_t>(options_.size)) {
    return "it is one of " + std::to_string(hello.ranks) + " ranks, this group has " +
           std::to_string(options_.size);
  }
  const auto rank = static_cast<int>(hello.rank);
  if (guest.is_ours && (rank != guest.peer || hello.traffic != guest.traffic)) {
    return "it is not the rank that this one connected to: it says rank " + std::to_string(rank);
  }
  if (!guest.is_ours && rank <= options_.rank)
    return "rank " + std::to_string(rank) + " does not connect here";
  if (established_[place_of(rank, hello.traffic)]) {
    return "rank " + std::to_string(rank) + " has already connected";
  }
  return std::nullopt;
}

}  // namespace weft::transport::mesh
