// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <weft/base/shortage.h>
#include <weft/transport/tcp/dial.h>

namespace weft::transport::tcp {

namespace {

Blame blame_of(int number) {
  if (number == ETIMEDOUT) return Blame::Timeout;
  const bool no_port_is_left = number == EADDRNOTAVAIL;
  return is_shortage(number) || no_port_is_left ? Blame::Busy : Blame::PeerLost;
}

bool is_without_route(int number) {
  return number == ENETUNREACH || number == EHOSTUNREACH || number == EAFNOSUPPORT;
}

// Sends everything in one write: the socket is new and has room for so few bytes.
bool send_whole(tls::Socket& socket, Greeting::Bytes bytes) {
  const iovec whole{bytes.data(), bytes.size()};
  return socket.send({&whole, 1}) == static_cast<ssize_t>(bytes.size());
}

}  // namespace

Dial::Dial(const std::shared_ptr<EventLoop>& loop, const Address& address, Deadline deadline,
           bool refusal_ends, const Settings& settings, Done done)
    : loop_(loop),
      address_(address),
      deadline_(deadline),
      refusal_ends_(refusal_ends),
      settings_(settings),
      done_(std::move(done)),
      pause_(settings.first_pause) {}

std::shared_ptr<Dial> Dial::make(const std::shared_ptr<EventLoop>& loop, const Address& address,
                                 Deadline deadline, bool refusal_ends, const Settings& settings,
                                 Done done) {
  return std::shared_ptr<Dial>(
      new Dial(loop, address, deadline, refusal_ends, settings, std::move(done)));
}

void Dial::begin() {
  if (const auto loop = loop_.lock())
    loop->post([self = shared_from_this()] { self->begin_round(); });
}

void Dial::cancel() noexcept {
  if (const auto loop = loop_.lock()) {
    loop->post([self = shared_from_this()] {
      self->done_ = nullptr;
      self->start_over();
    });
  }
}

void Dial::begin_round() {
  if (!done_) return;
  if (deadline_.passed()) return end_round();
  candidates_.clear();
  next_ = 0;
  failures_.clear();
  worth_another_ = was_refused_ = lacks_route_ = false;
  for (const Host& host : address_.hosts) {
    const auto address = numeric_address(host);
    if (!address) return resolve_names();
    candidates_.push_back(*address);
  }
  try_next();
}

void Dial::resolve_names() {
  const auto loop = loop_.lock();
  if (!loop) return;
  timer_ = loop->at(deadline_, [self = shared_from_this()] {
    self->failures_ = "its name is still being resolved";
    self->end_round();
  });
  // Detached, because nothing ends getaddrinfo early. The thread owns everything that it touches.
  const auto work = [hosts = address_.hosts, weak = weak_from_this(), weak_loop = loop_] {
    std::vector<SocketAddress> found;
    std::string failures;
    for (const Host& host : hosts) {
      const auto addresses = resolve(host);
      if (addresses) {
        found.insert(found.end(), addresses.value().begin(), addresses.value().end());
      } else {
        failures += (failures.empty() ? "" : ", ") + addresses.error().text();
      }
    }
    if (const auto alive = weak_loop.lock()) {
      alive->post([weak, found, failures] {
        if (const auto self = weak.lock()) self->resolved(found, failures);
      });
    }
  };
  try {
    std::thread(work).detach();
  } catch (const std::system_error& error) {
    resolved({}, error.what());
  }
}

void Dial::resolved(const std::vector<SocketAddress>& found, const std::string& failures) {
  if (!done_) return;
  candidates_ = found;
  failures_ = failures;
  worth_another_ = !failures.empty();  // a name may resolve later
  blame_ = Blame::PeerLost;
  try_next();
}

void Dial::start_over() {
  timer_.reset();
  calls_.clear();
  answered_ = 0;
}

void Dial::try_next() {
  start_over();
  if (next_ == candidates_.size() || deadline_.passed()) return end_round();
  const auto loop = loop_.lock();
  if (!loop) return;
  if (settings_.sockets > 1 &&
      ::getrandom(&connection_key_, sizeof connection_key_, 0) != sizeof connection_key_) {
    return attempt_failed(Blame::Busy, std::strerror(errno), errno);
  }
  while (calls_.size() < settings_.sockets) {
    Descriptor socket = connect(candidates_[next_]);
    if (!socket) return attempt_failed(blame_of(errno), std::strerror(errno), errno);
    calls_.push_back({.socket = std::move(socket)});
  }
  const auto self = shared_from_this();
  timer_ = loop->at(Deadline::sooner(deadline_, Deadline::in(settings_.attempt)),
                    [self] { self->attempt_failed(Blame::Timeout, self->why_late(), ETIMEDOUT); });
  const std::size_t attempt = next_;
  for (std::size_t i = 0; i < calls_.size() && next_ == attempt; ++i)
    watch(i, EPOLLOUT, &Dial::connected);
}

std::string Dial::why_late() const {
  const auto shakes_hands = [](const Call& call) { return call.shakes_hands; };
  if (std::none_of(calls_.begin(), calls_.end(), shakes_hands)) return "no answer";
  return "the TLS handshake took longer than " + describe(settings_.attempt);
}

// Calls `next` at these events, in place of an earlier watch of the socket.
void Dial::watch(std::size_t index, std::uint32_t events, void (Dial::*next)(std::size_t)) {
  const auto loop = loop_.lock();
  if (!loop) return;
  try {
    calls_[index].watch.reset();
    calls_[index].watch = loop->watch(
        calls_[index].socket.get(), events,
        [self = shared_from_this(), index, next](std::uint32_t) { ((*self).*next)(index); });
  } catch (const Error& error) {
    attempt_failed(Blame::Busy, error.text(), error.native_code());
  }
}

// Returns an empty descriptor, with errno, if connecting fails at once.
Descriptor Dial::connect(const SocketAddress& address) {
  Descriptor socket = make_socket(address.family());
  if (!socket || ::connect(socket.get(), address.get(), address.length) == 0 ||
      errno == EINPROGRESS)
    return socket;
  const int number = errno;
  socket = Descriptor();
  errno = number;
  return socket;
}

void Dial::connected(std::size_t index) {
  Call& call = calls_[index];
  call.watch.reset();
  int number = 0;
  socklen_t bytes = sizeof number;
  ::getsockopt(call.socket.get(), SOL_SOCKET, SO_ERROR, &number, &bytes);
  // If nobody listens at a port that is in the kernel's range of local ports, a socket may connect
  // to itself.
  if (number == 0 && local_end(call.socket.descriptor()) == remote_end(call.socket.descriptor()))
    number = ECONNREFUSED;
  if (number != 0) return attempt_failed(blame_of(number), std::strerror(number), number);
  if (!settings_.credentials) return greet(index);
  try {
    call.socket.encrypt(settings_.credentials, tls::Role::Connector);
  } catch (const Error& error) {
    return attempt_failed(Blame::Busy, error.text(), error.native_code());
  }
  call.shakes_hands = true;
  shake_hands(index);
}

// The greeting follows the handshake, so only a peer with a right certificate sees it.
void Dial::shake_hands(std::size_t index) {
  Call& call = calls_[index];
  switch (call.socket.handshake()) {
    case tls::Progress::Done: call.shakes_hands = false; return greet(index);
    case tls::Progress::Lost:
      return attempt_failed(Blame::PeerLost, call.socket.failure(), ECONNRESET);
    case tls::Progress::Failed: return attempt_failed(Blame::PeerLost, call.socket.failure(), 0);
    case tls::Progress::Waits:
      return watch(index, call.socket.has_unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN,
                   &Dial::shake_hands);
  }
}

void Dial::greet(std::size_t index) {
  Call& call = calls_[index];
  const Stripe stripe{connection_key_, static_cast<std::uint16_t>(index),
                      static_cast<std::uint16_t>(calls_.size())};
  if (!send_whole(call.socket, Greeting::encode(address_.identity, stripe))) {
    const int number = errno;
    // The peer may have said before why it closes.
    if (call.greeting.receive(call.socket) == Greeting::Progress::Mismatch)
      return attempt_failed(Blame::PeerLost, call.greeting.failure(), 0);
    return attempt_failed(Blame::PeerLost, std::strerror(number), number);
  }
  watch(index, EPOLLIN, &Dial::read_greeting);
}

void Dial::read_greeting(std::size_t index) {
  Call& call = calls_[index];
  const auto progress = call.greeting.receive(call.socket);
  if (progress == Greeting::Progress::Wants) return;
  // A socket that closes before it greets may belong to a listener that is closing or short of
  // descriptors, so another round may succeed; a stranger stays one.
  if (progress == Greeting::Progress::Lost)
    return attempt_failed(Blame::PeerLost, call.greeting.failure(), ECONNRESET);
  if (progress != Greeting::Progress::Whole)
    return attempt_failed(Blame::PeerLost, call.greeting.failure(), 0);
  if (address_.identity.given() && call.greeting.identity() != address_.identity) {
    return attempt_failed(Blame::PeerLost, "another listener has this port now", 0);
  }
  call.watch.reset();
  if (++answered_ < calls_.size()) return;
  Made made{{}, candidates_[next_].text()};
  for (Call& each : calls_) made.sockets.push_back(std::move(each.socket));
  start_over();
  finish(std::move(made));
}

void Dial::attempt_failed(Blame blame, const std::string& why, int number) {
  failures_ += (failures_.empty() ? "" : ", ") + candidates_[next_].text() + " (" + why + ")";
  const bool is_final = refusal_ends_ && number == ECONNREFUSED;
  const bool lacks_route = refusal_ends_ && is_without_route(number);
  was_refused_ |= is_final;
  lacks_route_ |= lacks_route;
  if (!was_refused_ || !lacks_route) {  // a refusal says more
    blame_ = blame;
    number_ = number;
  }
  // Waiting frees no descriptors of this process (EMFILE), so the caller should learn of it.
  worth_another_ |= number != 0 && number != EMFILE && !is_final && !lacks_route;
  ++next_;
  try_next();
}

void Dial::end_round() {
  // If the peer refuses at one address, one without a route to it does not lead there later.
  worth_another_ |= lacks_route_ && !was_refused_;
  if (deadline_.passed() || !worth_another_) {
    if (failures_.empty()) failures_ = "the deadline had already passed";
    const bool is_out_of_reach =
        blame_ == Blame::Timeout || number_ == EHOSTUNREACH || number_ == ENETUNREACH;
    const char* const hint = is_out_of_reach ? "; if that address cannot be reached from here, set "
                                               "WEFT_SOCKET_IFNAME there to choose another"
                                             : "";
    return finish(Error(
        blame_, "cannot connect (tcp) to " + text() + ": " + failures_ + hint + remedy_for(number_),
        number_));
  }
  const auto loop = loop_.lock();
  if (!loop) return;
  timer_ = loop->at(Deadline::sooner(deadline_, Deadline::in(pause_)),
                    [self = shared_from_this()] { self->begin_round(); });
  pause_ = std::min(pause_ * 2, settings_.longest_pause);
}

void Dial::finish(Result<Made> result) {
  if (const Done done = std::exchange(done_, nullptr)) done(std::move(result));
}

std::string Dial::text() const {
  std::string hosts;
  for (const Host& host : address_.hosts) hosts += (hosts.empty() ? "" : ",") + host.text();
  return hosts;
}

}  // namespace weft::transport::tcp
