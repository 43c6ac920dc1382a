// SPDX-License-Identifier: Apache-2.0
// Settings of the tcp backend: its times, which only tests change, and how many sockets a
// connection has.
//
// How a dead peer is noticed: if it was killed, its kernel reports it at once. If its machine went
// down or a cable was cut, nothing reports it; an idle connection then ends after `idle + probes *
// probe_pause` (30 s), one with bytes in transit after 1 to 1.5 times `silence` (30 to 45 s). A
// peer that answers but reads nothing (stopped in a debugger, busy) is waited for without limit.
// While it reads nothing, the kernel probes it up to two minutes apart, so a cut is noticed later.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include <weft/transport/stream/stream_connection.h>
#include <weft/transport/tls/credentials.h>

namespace weft::transport::tcp {

constexpr std::size_t kMaxSockets = 16;

struct Settings {
  // Sockets of a connection that is made from here (StripedStream); up to kMaxSockets.
  // Of a program's connections: Config::tcp_sockets (WEFT_TCP_SOCKETS, base/config.h).
  std::size_t sockets = 1;
  // If given, all connections speak TLS. Of a program's connections: tls::credentials().
  std::shared_ptr<const tls::Credentials> credentials = nullptr;
  std::chrono::seconds idle{15};        // before the kernel probes whether the peer is alive
  std::chrono::seconds probe_pause{5};  // between two probes
  int probes = 3;                       // unanswered probes that end the connection
  // Bytes in transit for so long without any acknowledgement end the connection.
  std::chrono::milliseconds silence{30'000};
  std::chrono::milliseconds attempt{5'000};  // for one address: to connect and be greeted
  std::chrono::milliseconds first_pause{2};  // between two rounds over a peer's addresses; doubles
  std::chrono::milliseconds longest_pause{500};  // limit of this pause
  std::chrono::milliseconds greeting{10'000};    // for a socket that connects here to greet
  std::chrono::milliseconds linger = kLinger;    // after close(), for the peer to end its side
  // Before accepting again after descriptors or memory ran out.
  std::chrono::milliseconds shortage{100};
};

}  // namespace weft::transport::tcp
