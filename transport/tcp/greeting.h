// SPDX-License-Identifier: Apache-2.0
// The first bytes on a socket, in both directions. The connecting side names the listener that it
// means. That listener answers with its own name, or with none if another is meant. So neither a
// port scanner nor another program's server is ever taken for a peer. The connecting side also says
// which socket of which connection this is; a connection is answered when all of its sockets have
// arrived (docs/wire.md).
//
// A greeting has "weft/tcp" (8 bytes), version 2 (4), machine (4) and listener (8) as in the
// address, the connection's random number (8), the index of the socket (2, from 0) and the number
// of sockets (2, 1 to 16), all little-endian. An answer has 0, 0 and 1 in the last three.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <weft/transport/tcp/address.h>
#include <weft/transport/tls/socket.h>

namespace weft::transport::tcp {

// One of the sockets of a connection.
struct Stripe {
  // Random; equal for all sockets of a connection; 0 for a single one.
  std::uint64_t connection_key = 0;
  std::uint16_t index = 0;
  std::uint16_t count = 1;
  // Returns ", socket 2 of 4", for messages; "" for the only socket.
  std::string text() const;
  friend bool operator==(const Stripe&, const Stripe&) = default;
};

class Greeting {
 public:
  static constexpr std::size_t kBytes = 36;
  using Bytes = std::array<std::byte, kBytes>;

  static Bytes encode(const Identity& identity, const Stripe& stripe = {});

  // Lost: the other end closed. Foreign: the bytes are not a greeting. Mismatch: the two ends do
  // not agree on TLS, or a certificate is refused.
  enum class Progress { Wants, Whole, Lost, Foreign, Mismatch };
  // Reads the bytes that have arrived, never a byte more than the greeting.
  Progress receive(tls::Socket& socket);
  // Valid after Whole.
  Identity identity() const;
  Stripe stripe() const;  // index below count, count from 1 to kMaxSockets
  // Valid after Lost, Foreign or Mismatch.
  const std::string& failure() const { return failure_; }

 private:
  // Returns why the bytes so far cannot be a greeting; empty if they can.
  std::string why_foreign() const;
  bool speaks_tls() const;

  Bytes bytes_{};
  std::size_t count_ = 0;
  std::string failure_;
};

}  // namespace weft::transport::tcp
