#include <atomic>
#include <cerrno>
#include <map>
#include <random>

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/log.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/tcp_listener.h>

namespace weft::transport::tcp {

namespace {

constexpr int kBacklog = 4096;         // the kernel's own limit is often lower
constexpr std::size_t kGuests = 1024;  // that have not greeted yet
constexpr int kTakenInOneTurn = 64;

bool is_shortage(int number) { return number == EMFILE || number == ENFILE || number == ENOBUFS || number == ENOMEM; }

Identity fresh_identity() {
  std::random_device random;
  return {this_machine(), static_cast<std::uint64_t>(random()) << 32 | random()};
}

}  // namespace

class TcpListener::Entrance : public std::enable_shared_from_this<Entrance> {
 public:
  Entrance(const std::shared_ptr<EventLoop>& loop, const Settings& settings, Accepted accepted)
      : loop_(loop), settings_(settings), accepted_(std::move(accepted)), identity_(fresh_identity()) {}

  // Listens there; returns errno. Before open().
  int add_door(SocketAddress address);
  Address address() const;
  void open();
  // From every thread: nobody gets in from now on. The rest goes on the loop.
  void close() noexcept;
  void clear();

 private:
  struct Door {
    Socket socket;
    EventLoop::Registration watch;  // or the timer that opens it again
  };
  struct Guest {
    Socket socket;
    Greeting greeting;
    EventLoop::Registration watch;
    EventLoop::Registration timer;
  };

  void watch(std::size_t door);
  void accept_at(std::size_t door);
  void pause(std::size_t door, int number);
  void receive(Socket socket);
  void greet(std::uint64_t key);
  void let_in(Guest guest);

  const std::weak_ptr<EventLoop> loop_;  // whose tables own this
  const Settings settings_;
  const Accepted accepted_;
  const Identity identity_;
  std::atomic<bool> closed_{false};
  std::vector<Door> doors_;
  bool short_of_something_ = false;        // and has said so
  std::map<std::uint64_t, Guest> guests_;  // in the order in which they came
  std::uint64_t next_guest_ = 1;
};

int TcpListener::Entrance::add_door(SocketAddress address) {
  Socket socket = make_socket(address.family());
  if (!socket) return errno;
  const int one = 1;
  if (address.family() == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  if (::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), kBacklog) != 0) return errno;
  doors_.push_back({std::move(socket), {}});
  return 0;
}

Address TcpListener::Entrance::address() const {
  Address made;
  made.identity = identity_;
  for (const Door& door : doors_) made.hosts.push_back(Address::parse(local_end(door.socket).text()).hosts.front());
  return made;
}

void TcpListener::Entrance::open() {
  for (std::size_t door = 0; door < doors_.size(); ++door) watch(door);
}

void TcpListener::Entrance::close() noexcept {
  closed_ = true;
  for (const Door& door : doors_) ::shutdown(door.socket.get(), SHUT_RDWR);  // ends listening at once
}

void TcpListener::Entrance::clear() {
  for (Door& door : doors_) door.watch.reset();
  guests_.clear();
}

void TcpListener::Entrance::watch(std::size_t door) {
  const auto loop = loop_.lock();
  if (!loop || closed_) return;
  try {
    doors_[door].watch = loop->watch(doors_[door].socket.get(), EPOLLIN,
                                     [self = shared_from_this(), door](std::uint32_t) { self->accept_at(door); });
  } catch (const Error& error) {
    pause(door, error.native_code());
  }
}

void TcpListener::Entrance::accept_at(std::size_t door) {
  for (int i = 0; i < kTakenInOneTurn && !closed_; ++i) {
    Socket socket(::accept4(doors_[door].socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      short_of_something_ = false;
      receive(std::move(socket));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (is_shortage(errno)) return pause(door, errno);
    // Anything else concerns the one that knocked: it has gone again, or a firewall is in between.
  }
}

// Who knocks stays readable, so that looking at once again would spin.
void TcpListener::Entrance::pause(std::size_t door, int number) {
  const auto loop = loop_.lock();
  if (!loop || closed_) return;
  if (!std::exchange(short_of_something_, true)) {
    log::warn(system_error(Blame::Busy,
                           "tcp: cannot accept connections at " + local_end(doors_[door].socket).text() + " for now",
                           number)
                  .text());
  }
  doors_[door].watch = loop->at(Deadline::in(settings_.shortage), [self = shared_from_this(), door] { self->watch(door); });
}

void TcpListener::Entrance::receive(Socket socket) {
  const auto loop = loop_.lock();
  if (!loop) return;
  // Who has been silent the longest makes room: hardly a peer, and if so it tries again.
  if (guests_.size() >= kGuests) guests_.erase(guests_.begin());
  const std::uint64_t key = next_guest_++;
  Guest& guest = guests_[key];
  guest.socket = std::move(socket);
  const auto self = shared_from_this();
  try {
    guest.timer = loop->at(Deadline::in(settings_.greeting), [self, key] { self->guests_.erase(key); });
    guest.watch = loop->watch(guest.socket.get(), EPOLLIN, [self, key](std::uint32_t) { self->greet(key); });
  } catch (const Error&) {
    guests_.erase(key);
  }
}

void TcpListener::Entrance::greet(std::uint64_t key) {
  const auto found = guests_.find(key);
  if (found == guests_.end()) return;
  const auto progress = found->second.greeting.receive(found->second.socket.get());
  if (progress == Greeting::Progress::Wants) return;
  Guest guest = std::move(found->second);
  guests_.erase(found);
  guest.watch.reset();
  guest.timer.reset();
  if (progress == Greeting::Progress::Whole && !closed_) return let_in(std::move(guest));
  log::debug("tcp: put out " + remote_end(guest.socket).text() + ": " + guest.greeting.failure());
}

void TcpListener::Entrance::let_in(Guest guest) {
  const auto loop = loop_.lock();
  if (!loop) return;
  const Identity meant = guest.greeting.identity();
  const bool welcome = !meant.given() || meant == identity_;
  const auto answer = Greeting::encode(welcome ? identity_ : Identity{});
  // Nothing was sent on it before, so there is room.
  const auto sent = ::send(guest.socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  const std::string peer = remote_end(guest.socket).text();
  if (sent != static_cast<ssize_t>(answer.size())) return;
  if (!welcome) return log::debug("tcp: refused " + peer + ", which means another listener");
  accepted_(std::make_unique<TcpStream>(loop, std::move(guest.socket), peer, settings_));
}

TcpListener::TcpListener(const std::shared_ptr<EventLoop>& loop, const std::string& interface_address,
                         const Settings& settings, Accepted accepted)
    : loop_(loop), entrance_(std::make_shared<Entrance>(loop, settings, std::move(accepted))) {
  int number = 0;
  for (const SocketAddress& address : local_addresses(interface_address)) {
    const int failed = entrance_->add_door(address);
    if (failed != 0) number = failed;
  }
  const Address address = entrance_->address();
  if (address.hosts.empty()) {
    throw system_error(is_shortage(number) ? Blame::Busy : Blame::Caller,
                       "tcp: cannot listen on '" + (interface_address.empty() ? "loopback" : interface_address) + "'",
                       number);
  }
  address_ = address.text();
  loop->post([entrance = entrance_] { entrance->open(); });
}

TcpListener::~TcpListener() {
  entrance_->close();
  loop_->post([entrance = std::move(entrance_)] { entrance->clear(); });
}

}  // namespace weft::transport::tcp
