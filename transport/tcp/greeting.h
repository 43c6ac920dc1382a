// The first bytes of a connection, both ways: who connects names the listener it means, which answers with its own name or,
// meant for another, with none. So neither a port scanner nor another program's server is ever taken for a peer.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include <weft/transport/tcp/address.h>

namespace weft::transport::tcp {

class Greeting {
 public:
  static constexpr std::size_t kBytes = 24;
  using Bytes = std::array<std::byte, kBytes>;

  static Bytes encode(const Identity& identity);

  enum class Progress { Wants, Whole, Lost, Foreign };
  // Takes in what has come, never a byte more. Lost: the other end closed; Foreign: bytes came that are no greeting.
  Progress receive(int socket);
  // Once whole.
  Identity identity() const;
  // Once lost or foreign.
  const std::string& failure() const { return failure_; }

 private:
  Bytes bytes_{};
  std::size_t count_ = 0;
  std::string failure_;
};

}  // namespace weft::transport::tcp
