// SPDX-License-Identifier: Apache-2.0
// Ports of ranks on the loopback, and connections to them whose frames a test writes.
#pragma once

#include <string>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <weft/base/descriptor.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/published.h>
#include <weft/engine/store/address.h>

namespace weft::group {

struct Port {
  Published address;
  Descriptor socket;
};

// Of a job of `ranks` ranks.
inline Port open_port(const std::string& host, int ranks, int backlog = 100) {
  Port port{{host, 0, "token", ranks},
            Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0))};
  const SocketAddress any = socket_address(host, 0);
  EXPECT_EQ(::bind(port.socket.get(), any.get(), any.length), 0);
  EXPECT_EQ(::listen(port.socket.get(), backlog), 0);
  port.address.port = port_of(port.socket.get());
  return port;
}

inline Descriptor dial_and_wait(const Published& address) {
  Descriptor socket = dial_socket(address);
  pollfd connected{socket.get(), POLLOUT, 0};
  EXPECT_EQ(::poll(&connected, 1, -1), 1);
  return socket;
}

inline void write_frame(const Descriptor& socket, const Frame& frame) {
  const std::string bytes = encode(frame);
  EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

// Waits until bytes have arrived. Returns false if the connection has ended.
inline bool awaits_bytes(const Descriptor& socket) {
  pollfd one{socket.get(), POLLIN, 0};
  char byte = 0;
  return ::poll(&one, 1, -1) == 1 && ::recv(socket.get(), &byte, 1, MSG_PEEK) == 1;
}

// True if the peer has closed the connection.
inline bool has_ended(const Descriptor& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

}  // namespace weft::group
