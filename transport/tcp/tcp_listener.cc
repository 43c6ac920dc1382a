// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/first_warnings.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/socket.h>
#include <weft/transport/tcp/striped_stream.h>
#include <weft/transport/tcp/tcp_listener.h>
#include <weft/transport/tls/plain_text.h>

namespace weft::transport::tcp {

namespace {

constexpr int kBacklog = 4096;         // the kernel's own limit is often lower
constexpr std::size_t kGuests = 1024;  // sockets without a greeting or a complete connection
constexpr int kTakenInOneTurn = 64;
// A guest that has been here for so long makes room if the process has no descriptor left.
constexpr auto kRoom = std::chrono::seconds(1);

// Sends in one write: there is room, because hardly anything was sent on this socket before.
bool answer(tls::Socket& socket, const Identity& identity) {
  auto bytes = Greeting::encode(identity);
  const iovec whole{bytes.data(), bytes.size()};
  return socket.send({&whole, 1}) == static_cast<ssize_t>(bytes.size());
}

Identity fresh_identity() {
  std::random_device random;
  return {this_machine(), static_cast<std::uint64_t>(random()) << 32 | random()};
}

// An address at which a listener cannot listen, although it listens at others.
struct Missing {
  SocketAddress address;
  int number = 0;  // errno

  void say(bool is_asked_for) const {
    const std::string at = address.text();
    const std::string text = "tcp: does not listen at " + at.substr(0, at.rfind(':')) +
                             ", only at others: " + std::strerror(number);
    // A machine without IPv6 is fine unless the user asked for more than the loopback.
    const bool has_no_such = number == EAFNOSUPPORT || number == EADDRNOTAVAIL;
    has_no_such && !is_asked_for ? log::info(text) : log::warn(text);
  }
};

}  // namespace

class TcpListener::Entrance : public std::enable_shared_from_this<Entrance> {
 public:
  Entrance(const std::shared_ptr<EventLoop>& loop, const Settings& settings, Accepted accepted,
           Short short_of_something)
      : loop_(loop),
        settings_(settings),
        accepted_(std::move(accepted)),
        tell_(std::move(short_of_something)),
        identity_(fresh_identity()) {}

  // Listens at the address. Returns 0 or errno. Call it before open().
  int add_door(SocketAddress address);
  Address address() const;
  void open();
  // Stops accepting at once. Thread-safe; clear() does the rest on the loop.
  void close() noexcept;
  void clear();

 private:
  struct Door {
    Descriptor socket;
    EventLoop::Registration watch;  // or the timer that resumes watching
  };
  struct Guest {
    tls::Socket socket;
    Greeting greeting;
    EventLoop::Registration watch;
    EventLoop::Registration timer;
    bool shakes_hands = false;
    bool greeted = false;  // but its connection is incomplete
    Deadline makes_room = Deadline::in(kRoom);
  };

  void watch(std::size_t door);
  void accept_at(std::size_t door);
  bool makes_room();
  void pause(std::size_t door, int number);
  void receive(Descriptor socket);
  void await(std::uint64_t key, std::uint32_t events);
  void on_bytes(std::uint64_t key);
  bool has_shaken_hands(std::uint64_t key);
  void greet(std::uint64_t key);
  void be_late(std::uint64_t key);
  void refuse(std::uint64_t key, const std::string& why);
  void welcome(std::uint64_t key);
  void put_out(std::uint64_t key, const std::string& why);
  void let_in(std::vector<Guest> guests);

  const std::weak_ptr<EventLoop> loop_;  // weak: the loop's handlers own this
  const Settings settings_;
  const Accepted accepted_;
  const Short tell_;
  const Identity identity_;
  std::atomic<bool> closed_{false};
  std::vector<Door> doors_;
  bool short_of_something_ = false;        // and has reported it
  std::map<std::uint64_t, Guest> guests_;  // in order of arrival
  std::uint64_t next_guest_ = 1;
  FirstWarnings warnings_;  // of peers that do not agree on TLS
};

int TcpListener::Entrance::add_door(SocketAddress address) {
  Descriptor socket = make_socket(address.family());
  if (!socket) return errno;
  const int one = 1;
  if (address.family() == AF_INET6)
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  if (::bind(socket.get(), address.get(), address.length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0)
    return errno;
  doors_.push_back({std::move(socket), {}});
  return 0;
}

Address TcpListener::Entrance::address() const {
  Address made;
  made.identity = identity_;
  for (const Door& door : doors_)
    made.hosts.push_back(Address::parse(local_end(door.socket).text()).hosts.front());
  return made;
}

void TcpListener::Entrance::open() {
  for (std::size_t door = 0; door < doors_.size(); ++door) watch(door);
}

void TcpListener::Entrance::close() noexcept {
  closed_ = true;
  for (const Door& door : doors_)
    ::shutdown(door.socket.get(), SHUT_RDWR);  // stops listening at once
}

void TcpListener::Entrance::clear() {
  for (Door& door : doors_) door.watch.reset();
  guests_.clear();
}

void TcpListener::Entrance::watch(std::size_t door) {
  const auto loop = loop_.lock();
  if (!loop || closed_) return;
  try {
    doors_[door].watch =
        loop->watch(doors_[door].socket.get(), EPOLLIN,
                    [self = shared_from_this(), door](std::uint32_t) { self->accept_at(door); });
  } catch (const Error& error) {
    pause(door, error.native_code());
  }
}

void TcpListener::Entrance::accept_at(std::size_t door) {
  for (int i = 0; i < kTakenInOneTurn && !closed_; ++i) {
    Descriptor socket(
        ::accept4(doors_[door].socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      short_of_something_ = false;
      receive(std::move(socket));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (const int number = errno; is_shortage(number)) {
      if (makes_room()) continue;
      return pause(door, number);
    }
    // Any other error concerns the connecting peer alone: it has gone again, or a firewall
    // interferes.
  }
}

// Puts out the guest that has waited longest, if it has waited for long.
bool TcpListener::Entrance::makes_room() {
  if (guests_.empty() || !guests_.begin()->second.makes_room.passed()) return false;
  put_out(guests_.begin()->first, "this process has no descriptor left for others");
  return true;
}

// Stops watching for a while: a waiting peer keeps the socket readable, so the loop would spin. As
// long as there are guests, they are the reason, and soon make room.
void TcpListener::Entrance::pause(std::size_t door, int number) {
  const auto loop = loop_.lock();
  if (!loop || closed_) return;
  if (guests_.empty() && !std::exchange(short_of_something_, true)) {
    const Error why = system_error(
        Blame::Busy,
        "tcp: cannot accept connections at " + local_end(doors_[door].socket).text() + " for now",
        number);
    log::warn(why.text());
    if (tell_) tell_(why);
  }
  doors_[door].watch = loop->at(Deadline::in(settings_.shortage),
                                [self = shared_from_this(), door] { self->watch(door); });
}

void TcpListener::Entrance::receive(Descriptor socket) {
  const auto loop = loop_.lock();
  if (!loop) return;
  // The socket that has waited longest makes room: it is hardly a peer, and a peer would try again.
  if (guests_.size() >= kGuests)
    put_out(guests_.begin()->first, "too many sockets that have not greeted are open");
  const std::uint64_t key = next_guest_++;
  Guest& guest = guests_[key];
  guest.socket = std::move(socket);
  const auto self = shared_from_this();
  try {
    guest.timer = loop->at(Deadline::in(settings_.greeting), [self, key] { self->be_late(key); });
    await(key, EPOLLIN);
  } catch (const Error&) {
    guests_.erase(key);
  }
}

void TcpListener::Entrance::await(std::uint64_t key, std::uint32_t events) {
  const auto loop = loop_.lock();
  if (!loop) return;
  Guest& guest = guests_[key];
  guest.watch.reset();
  guest.watch =
      loop->watch(guest.socket.get(), events,
                  [self = shared_from_this(), key](std::uint32_t) { self->on_bytes(key); });
}

void TcpListener::Entrance::on_bytes(std::uint64_t key) {
  const auto found = guests_.find(key);
  if (found == guests_.end()) return;
  if (found->second.greeted) return put_out(key, "it closed, or sent more before it was answered");
  try {
    if (has_shaken_hands(key)) greet(key);
  } catch (const Error& error) {  // for lack of memory
    put_out(key, error.text());
  }
}

// Returns true if the guest may greet: it speaks plain text, or its TLS handshake is done.
bool TcpListener::Entrance::has_shaken_hands(std::uint64_t key) {
  Guest& guest = guests_[key];
  if (!settings_.credentials) return true;
  if (!guest.socket.is_encrypted()) {  // a silent guest costs no TLS session
    guest.socket.encrypt(settings_.credentials, tls::Role::Listener);
    guest.shakes_hands = true;
  }
  if (!guest.shakes_hands) return true;
  const bool had_unsent = guest.socket.has_unsent();
  switch (guest.socket.handshake()) {
    case tls::Progress::Done: guest.shakes_hands = false; break;
    case tls::Progress::Lost: put_out(key, guest.socket.failure()); return false;
    case tls::Progress::Failed: refuse(key, guest.socket.failure()); return false;
    case tls::Progress::Waits: break;
  }
  const bool has_unsent = guest.socket.has_unsent();
  if (has_unsent != had_unsent) await(key, has_unsent ? EPOLLIN | EPOLLOUT : EPOLLIN);
  return !guest.shakes_hands;
}

void TcpListener::Entrance::be_late(std::uint64_t key) {
  const auto found = guests_.find(key);
  if (found == guests_.end()) return;
  const Guest& guest = found->second;
  if (!settings_.credentials || (guest.socket.is_encrypted() && !guest.shakes_hands))
    return put_out(key, "it did not greet in time");
  refuse(key, "the TLS handshake took longer than " + describe(settings_.greeting));
}

// Puts out a guest that was probably to be a peer. Its own error names the cause too, if it is one.
void TcpListener::Entrance::refuse(std::uint64_t key, const std::string& why) {
  const auto found = guests_.find(key);
  warnings_.warn("tcp: refused a connection from " +
                 remote_end(found->second.socket.descriptor()).text() + ": " + why);
  guests_.erase(found);
}

void TcpListener::Entrance::greet(std::uint64_t key) {
  Guest& guest = guests_[key];
  const auto progress = guest.greeting.receive(guest.socket);
  if (progress == Greeting::Progress::Wants) return;
  if (progress == Greeting::Progress::Mismatch) {
    if (!guest.socket.is_encrypted()) {
      ::send(guest.socket.get(), tls::kMismatch.data(), tls::kMismatch.size(),
             MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    return refuse(key, guest.greeting.failure());
  }
  if (progress != Greeting::Progress::Whole || closed_)
    return put_out(key, guest.greeting.failure());
  const Identity meant = guest.greeting.identity();
  if (!meant.given() || meant == identity_) return welcome(key);
  answer(guest.socket, {});
  put_out(key, "it means another listener");
}

void TcpListener::Entrance::put_out(std::uint64_t key, const std::string& why) {
  const auto found = guests_.find(key);
  log::debug("tcp: closed the socket of " + remote_end(found->second.socket.descriptor()).text() +
             ": " + why);
  guests_.erase(found);
}

// Checks whether the connection is complete. There are few enough guests for a search.
void TcpListener::Entrance::welcome(std::uint64_t key) {
  const Stripe stripe = guests_[key].greeting.stripe();
  std::vector<std::uint64_t> keys(stripe.count, 0);  // keys of guests, by index
  keys[stripe.index] = key;
  std::size_t here = 1;
  for (const auto& [other, guest] : guests_) {
    if (here == stripe.count) break;
    const Stripe known = guest.greeting.stripe();
    if (!guest.greeted || known.connection_key != stripe.connection_key) continue;
    if (known.count != stripe.count || keys[known.index] != 0) {
      return put_out(key, "its connection has another number of sockets, or already has this one");
    }
    keys[known.index] = other;
    ++here;
  }
  guests_[key].greeted = true;
  if (here < stripe.count) return;
  std::vector<Guest> guests;
  for (const std::uint64_t one : keys) {
    guests.push_back(std::move(guests_[one]));
    guests.back().watch.reset();
    guests.back().timer.reset();
    guests_.erase(one);
  }
  let_in(std::move(guests));
}

// Answers all sockets together, so that the connecting side gets a whole connection or none.
void TcpListener::Entrance::let_in(std::vector<Guest> guests) {
  const auto loop = loop_.lock();
  if (!loop) return;
  std::vector<std::unique_ptr<TcpStream>> sockets;
  for (Guest& guest : guests) {
    if (!answer(guest.socket, identity_)) return;
    const std::string peer = remote_end(guest.socket.descriptor()).text();
    sockets.push_back(std::make_unique<TcpStream>(loop, std::move(guest.socket), peer, settings_,
                                                  guest.greeting.stripe()));
  }
  accepted_(as_one(std::move(sockets)));
}

TcpListener::TcpListener(const std::shared_ptr<EventLoop>& loop,
                         const std::string& interface_address, const Settings& settings,
                         Accepted accepted, Short short_of_something)
    : loop_(loop),
      entrance_(std::make_shared<Entrance>(loop, settings, std::move(accepted),
                                           std::move(short_of_something))) {
  int number = 0;
  std::vector<Missing> missing;
  for (const SocketAddress& address : local_addresses(interface_address)) {
    const int failed = entrance_->add_door(address);
    if (failed == 0) continue;
    number = failed;
    missing.push_back({address, failed});
  }
  const Address address = entrance_->address();
  if (address.hosts.empty()) {
    throw system_error(is_shortage(number) ? Blame::Busy : Blame::Caller,
                       "tcp: cannot listen on " +
                           (interface_address.empty()
                                ? (number == EADDRNOTAVAIL
                                       ? "the loopback interface, which is down (ip link set lo up)"
                                       : "loopback")
                                : "'" + interface_address + "'"),
                       number);
  }
  for (const Missing& one : missing) one.say(/*is_asked_for=*/!interface_address.empty());
  address_ = address.text();
  loop->post([entrance = entrance_] { entrance->open(); });
}

TcpListener::~TcpListener() {
  entrance_->close();
  loop_->post([entrance = std::move(entrance_)] { entrance->clear(); });
}

}  // namespace weft::transport::tcp
