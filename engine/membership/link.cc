// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/make_error.h>
#include <weft/base/shortage.h>
#include <weft/engine/membership/link.h>
#include <weft/engine/store/address.h>
#include <weft/transport/tls/plain_text.h>

namespace weft::group {

Descriptor dial_socket(const Published& address) {
  const SocketAddress there = socket_address(address.host, address.port);
  Descriptor socket(
      ::socket(there.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket)
    throw system_error(is_shortage(errno) ? Blame::Busy : Blame::PeerLost, "connecting", errno);
  const int error = ::connect(socket.get(), there.get(), there.length) == 0 ? 0 : errno;
  if (error == 0 || error == EINPROGRESS) return socket;
  const std::string where = address.host + ":" + std::to_string(address.port);
  if (error == ECONNREFUSED)
    throw Error(Blame::PeerLost, "nobody listens at " + where + " any more", error);
  throw system_error(Blame::PeerLost, where + " cannot be reached", error);
}

void keep_alive(int socket) {
  const auto set = [socket](int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

namespace {

tcp_info info_of(int socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes);
  return info;
}

// True if the peer's kernel has acknowledged nothing for most of the time after which the
// connection ends. A peer that reads nothing ends the connection too, but its kernel answers.
bool is_silent(int socket) {
  unsigned limit = 0;
  socklen_t bytes = sizeof limit;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, &bytes) == 0 &&
         info_of(socket).tcpi_last_ack_recv >= limit / 3 * 2;
}

}  // namespace

Link::Link(std::shared_ptr<EventLoop> loop, Descriptor socket, int ranks, int rank, Events events)
    : loop_(std::move(loop)),
      socket_(std::move(socket)),
      end_of_process_(socket_.get()),
      events_(std::move(events)),
      rank_(rank),
      has_shaken_hands_(!tls_files().given()),
      reader_(ranks, /*has_greeted=*/false) {
  keep_alive(socket_.get());
}

void Link::start(std::chrono::milliseconds patience) {
  watch(EPOLLOUT);
  patience_ = loop_->at(Deadline::in(patience), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->has_greeted_) return;
    // This process may have been stopped, and not know yet that it is connected.
    const bool is_connecting = info_of(self->socket_.get()).tcpi_state == TCP_SYN_SENT;
    self->fail({"it does not answer", true, is_connecting});
  });
}

LinkEnd Link::end_by(int error) const {
  switch (error) {
    case 0:
    case ECONNRESET:
    case EPIPE: return {"its process ended"};
    case ECONNREFUSED: return {"nobody listens at its address any more"};
    default: break;
  }
  return {std::string("its machine does not answer: ") + std::strerror(error), true,
          !is_connected_ || is_silent(socket_.get())};
}

// Watches for bytes of the peer until it has finished, and for `more`.
void Link::watch(std::uint32_t more) {
  const std::uint32_t events = more | (has_read_all_ ? 0U : EPOLLIN);
  watch_.reset();
  watch_ = loop_->watch(socket_.get(), events, [weak = weak_from_this()](std::uint32_t happened) {
    if (const auto self = weak.lock()) self->on_event(happened);
  });
}

void Link::on_event(std::uint32_t events) {
  if (ended_) return;
  if (!is_connected_) {
    int error = 0;
    socklen_t bytes = sizeof error;
    ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) return fail(end_by(error));
    if ((events & EPOLLOUT) == 0) return;
    is_connected_ = true;
  }
  if (!has_shaken_hands_) {
    if (!shake_hands(events)) return;
    events |= EPOLLIN | EPOLLOUT;  // bytes may wait on both sides
  }
  if ((events & EPOLLOUT) != 0) {
    watch(0);
    flush();
  }
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0 && !ended_)
    has_read_all_ ? fail(end_by(0)) : read();
}

// Returns true once the handshake of TLS is done.
bool Link::shake_hands(std::uint32_t events) {
  using transport::tls::Progress;
  using transport::tls::Role;
  const bool is_ours = rank_ >= 0;  // this rank has connected
  if (!is_ours && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) {
    watch(0);  // a silent stranger costs no TLS session
    return false;
  }
  try {
    if (!socket_.is_encrypted()) {
      socket_.encrypt(transport::tls::credentials(), is_ours ? Role::Connector : Role::Listener);
    }
  } catch (const Error& error) {  // for lack of memory
    fail({error.text()});
    return false;
  }
  const Progress progress = socket_.handshake();
  has_shaken_hands_ = progress == Progress::Done;
  if (progress == Progress::Waits) watch(socket_.has_unsent() ? EPOLLOUT : 0U);
  if (progress == Progress::Lost || progress == Progress::Failed)
    fail({.how = socket_.failure(), .is_of_tls = progress == Progress::Failed});
  return has_shaken_hands_;
}

// Returns true, and tells the peer, if its first bytes are TLS and this process speaks plain text.
bool Link::speaks_tls(std::byte first) {
  namespace tls = transport::tls;
  if (has_greeted_ || socket_.is_encrypted() || !tls::is_tls(first)) return false;
  ::send(socket_.get(), tls::kMismatch.data(), tls::kMismatch.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return true;
}

void Link::read() {
  char buffer[65536];
  const iovec piece{buffer, sizeof buffer};
  do {  // TLS may hold bytes of which the socket has no event any more
    const auto count = socket_.receive({&piece, 1});
    if (count < 0 && errno == EAGAIN) return;
    if (count < 0 && errno == EPROTO) return fail({.how = socket_.failure(), .is_of_tls = true});
    if (count < 0) return fail(end_by(errno));
    if (count == 0) return on_end_of_bytes();
    if (speaks_tls(static_cast<std::byte>(*buffer)))
      return fail({.how = std::string(transport::tls::kPeerSpeaksTls), .is_of_tls = true});
    reader_.append({buffer, static_cast<std::size_t>(count)});
    while (!ended_) {
      Frame frame;
      const auto complete = reader_.next(frame);
      if (!complete) return fail({complete.error().text()});
      if (!complete.value()) break;
      events_.frame(*this, frame);
    }
  } while (!ended_ && socket_.is_encrypted());
}

void Link::on_end_of_bytes() {
  has_read_all_ = events_.read_all && events_.read_all(*this);
  if (ended_) return;
  has_read_all_ ? watch(unsent_.empty() && !socket_.has_unsent() ? 0U : EPOLLOUT) : fail(end_by(0));
}

void Link::greeted(int rank) {
  rank_ = rank;
  has_greeted_ = true;
  reader_.greeted();
  patience_.reset();
}

void Link::send(const std::string& bytes) {
  if (ended_ || failing_ || finishes_) return;
  if (unsent_.size() + bytes.size() > kMostUnsent)
    return fail_soon({"it reads too slowly: 64 MiB of messages wait for it"});
  unsent_ += bytes;
  flush_soon();
}

void Link::answer(const Frame& completed) {
  if (ended_ || failing_ || finishes_) return;
  answers_.add(completed);
  flush_soon();
}

void Link::flush_soon() {
  if (std::exchange(flushes_soon_, true)) return;
  loop_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->flush();
  });
}

void Link::flush() {
  flushes_soon_ = false;
  unsent_ += answers_.take();
  if (!is_connected_ || !has_shaken_hands_ || ended_) return;
  socket_.flush();
  bool is_full = socket_.has_unsent();
  std::size_t sent = 0;
  while (sent < unsent_.size() && !is_full) {
    const iovec rest{unsent_.data() + sent, unsent_.size() - sent};
    const auto count = socket_.send({&rest, 1});
    is_full = count < 0 ? errno == EAGAIN : socket_.has_unsent();
    if (count < 0) break;  // reading will show how the connection ended
    sent += static_cast<std::size_t>(count);
  }
  unsent_.erase(0, sent);
  if (finishes_ && unsent_.empty() && !std::exchange(has_finished_, true)) {
    socket_.finish_writing();
    is_full = socket_.has_unsent();
  }
  if (is_full) watch(EPOLLOUT);
}

void Link::finish() {
  if (std::exchange(finishes_, true)) return;
  flush();
}

// Fails in a later turn: the caller may be reading from this link, or passing a frame to all links.
void Link::fail_soon(const LinkEnd& end) {
  unsent_.clear();
  failing_ = loop_->at(Deadline::in(std::chrono::milliseconds(0)), [weak = weak_from_this(), end] {
    if (const auto self = weak.lock()) self->fail(end);
  });
}

void Link::fail(const LinkEnd& why) {
  if (ended_) return;
  const auto stay = shared_from_this();
  end();
  events_.ended(*this, why);
}

void Link::end() noexcept {
  ended_ = true;
  watch_.reset();
  patience_.reset();
  end_of_process_.reset();
}

}  // namespace weft::group
