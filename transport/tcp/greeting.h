// The first bytes of a connection, both ways: who connects names the listener it means, which
// answers with its own name or, meant for another, with none. So neither a port scanner nor another
// program's server is ever taken for a peer. Who connects also says which socket of which lane this
// is; a lane is answered when all of its sockets are there. The layout is in docs/wire.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <weft/transport/tcp/address.h>

namespace weft::transport::tcp {

// One of the sockets of a lane.
struct Part {
  std::uint64_t lane = 0;  // random, where there are several: its sockets have that in common
  std::uint16_t index = 0;
  std::uint16_t count = 1;
  // ", socket 2 of 4", for messages; nothing for the only one.
  std::string text() const;
  friend bool operator==(const Part&, const Part&) = default;
};

class Greeting {
 public:
  static constexpr std::size_t kBytes = 36;
  using Bytes = std::array<std::byte, kBytes>;

  static Bytes encode(const Identity& identity, const Part& part = {});

  enum class Progress { Wants, Whole, Lost, Foreign };
  // Takes in what has come, never a byte more. Lost: the other end closed; Foreign: bytes came that
  // are no greeting.
  Progress receive(int socket);
  // Once whole.
  Identity identity() const;
  Part part() const;  // index below count, count from 1 to kMaxSockets
  // Once lost or foreign.
  const std::string& failure() const { return failure_; }

 private:
  // Why the bytes that are there are those of no greeting; empty where they may be.
  std::string why_foreign() const;

  Bytes bytes_{};
  std::size_t count_ = 0;
  std::string failure_;
};

}  // namespace weft::transport::tcp
