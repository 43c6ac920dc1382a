// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <sys/socket.h>

#include <weft/transport/tls/socket.h>

namespace weft::transport::tls {

namespace {

msghdr message_of(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  return message;
}

}  // namespace

// Not MSG_ZEROCOPY: if both ends are on one host the kernel copies all the same, and its
// notifications cost more.
ssize_t Socket::send(std::span<const iovec> pieces) noexcept {
  if (session_) return session_->send(pieces);
  const msghdr message = message_of(pieces);
  ssize_t took = 0;
  do {
    took = ::sendmsg(get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (took < 0 && errno == EINTR);
  return took;
}

ssize_t Socket::receive(std::span<const iovec> pieces) noexcept {
  if (session_) return session_->receive(pieces);
  msghdr message = message_of(pieces);
  ssize_t got = 0;
  do {
    got = ::recvmsg(get(), &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  return got;
}

void Socket::finish_writing() noexcept {
  session_ ? session_->finish_writing() : static_cast<void>(::shutdown(get(), SHUT_WR));
}

}  // namespace weft::transport::tls
