// SPDX-License-Identifier: Apache-2.0
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <weft/transport/tcp/socket.h>

namespace weft::transport::tcp {

namespace {

// Send buffer between two processes of one host: so many bytes stay in a core's cache until they
// are read. The kernel would let the buffer grow to 4 MiB, and those bytes have to come back from
// memory (measured: ./dev bench transport --case "tcp stream"). The kernel doubles this value, and
// uses less if its limit (net.core.wmem_max) is lower.
constexpr int kNearBytes = 512 << 10;

bool is_near(SocketAddress one, SocketAddress other) {
  if (one.is_loopback() && other.is_loopback()) return true;
  one.set_port(0);
  other.set_port(0);
  return one == other;
}

}  // namespace

Descriptor make_socket(int family) noexcept {
  Descriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // Before the first byte: the greeting behind a TLS handshake would otherwise wait for the
  // acknowledgement of the handshake's last bytes, which the peer delays by 40 ms.
  const int one = 1;
  if (socket) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return socket;
}

void tune(const Descriptor& socket, const Settings& settings) noexcept {
  const auto set = [&socket](int level, int option, int value) {
    return ::setsockopt(socket.get(), level, option, &value, sizeof value) == 0;
  };
  if (!set(IPPROTO_TCP, TCP_NODELAY, 1)) return;
  // Not TCP_USER_TIMEOUT: since Linux 5.11 it also ends connections to peers that answer but read
  // nothing for that long.
  set(IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(settings.idle.count()));
  set(IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(settings.probe_pause.count()));
  set(IPPROTO_TCP, TCP_KEEPCNT, settings.probes);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  if (is_near(local_end(socket), remote_end(socket))) set(SOL_SOCKET, SO_SNDBUF, kNearBytes);
}

SocketAddress local_end(const Descriptor& socket) noexcept {
  SocketAddress end;
  end.length = sizeof end.storage;
  if (::getsockname(socket.get(), end.get(), &end.length) != 0) end.length = 0;
  return end;
}

SocketAddress remote_end(const Descriptor& socket) noexcept {
  SocketAddress end;
  end.length = sizeof end.storage;
  if (::getpeername(socket.get(), end.get(), &end.length) != 0) end.length = 0;
  return end;
}

}  // namespace weft::transport::tcp
