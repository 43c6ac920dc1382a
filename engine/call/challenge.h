// SPDX-License-Identifier: Apache-2.0
// If the workers have a secret, the connecting side of a connection has to prove that it knows it
// before anything else of it is read (docs/wire.md). Owned by the Inbound of the connection, and
// used on the loop. Nothing here blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <weft/engine/call/secret.h>
#include <weft/transport/connection.h>

namespace weft::call {

class Challenge {
 public:
  // Whether the peer has proved that it knows the secret.
  bool is_proven() const { return is_proven_; }
  struct Answer {
    std::string wrong;              // why the peer is refused
    std::vector<std::byte> answer;  // else, the body of the challenge to send back, if any
  };
  // The peer's next challenge. The caller still has to accept the arrival.
  Answer challenged(const std::string& secret, const transport::Arrival& arrival);

 private:
  struct Nonces {
    Nonce of_connector;
    Nonce of_listener;
  };
  std::optional<Nonces> nonces_;  // set when the peer has sent its nonce
  bool is_proven_ = false;
};

}  // namespace weft::call
