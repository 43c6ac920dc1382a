// SPDX-License-Identifier: Apache-2.0
// A secret that processes share. Both ends of a connection prove that they know it before either
// reads anything else from the other, by three messages:
//
//   connector                             listener
//   nonce c                           →
//                                     ←   nonce l, proof(listener, c, l)
//   proof(connector, c, l)            →
//
// The nonces are fresh, so an overheard proof proves nothing later. The sides differ, so a proof
// cannot be sent back to its maker. The messages after that are neither encrypted nor signed.
// docs/wire.md has the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/result.h>

namespace weft::transport {

// A process that connects gets a proof on which it can try guesses.
inline constexpr std::size_t kShortestSecret = 16;  // bytes

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

enum class Side : std::uint8_t { Connector = 1, Listener = 2 };

// Throws Busy if the system gives no random bytes.
Nonce make_nonce();
// HMAC-SHA-256 of the parts, one behind the other, with the secret as its key. The parts begin with
// a text that names their purpose and version, so that they prove nothing else.
Proof sign(std::string_view secret, std::initializer_list<std::span<const std::byte>> parts);
// The proof of one side of a connection. `bound` is what both ends have to agree on besides.
Proof prove(std::string_view secret, std::string_view purpose, Side side, const Nonce& of_connector,
            const Nonce& of_listener, std::span<const std::byte> bound = {});
// Takes the same time wherever the two differ. False if the sizes differ.
bool is_same(const Proof& expected, std::span<const std::byte> shown);

// One end's part in it. Not thread-safe; nothing blocks.
class Challenge {
 public:
  // `purpose` must outlive it; `bound` as in prove().
  Challenge(Side own, std::string secret, std::string_view purpose,
            std::vector<std::byte> bound = {});

  // The connector's first message. Throws Busy if the system gives no random bytes.
  std::vector<std::byte> open();
  // Reads the other end's next message. Returns the message that answers it, which is empty if
  // there is none; or why the other end is refused: "it does not know the secret". A further
  // message of an end that has been refused or is proven is refused.
  Result<std::vector<std::byte>> answer(std::span<const std::byte> message);
  // Whether the other end has proved that it knows the secret.
  bool is_proven() const { return step_ == Step::Proven; }

 private:
  enum class Step : std::uint8_t { Begins, Awaits, Proven, Refused };
  Result<std::vector<std::byte>> answer_nonce(std::span<const std::byte> message);
  Result<std::vector<std::byte>> answer_proof(std::span<const std::byte> message);
  Proof proof_of(Side side) const;

  Side own_;
  std::string secret_;
  std::string_view purpose_;
  std::vector<std::byte> bound_;
  Step step_ = Step::Begins;
  Nonce of_connector_{};
  Nonce of_listener_{};
};

}  // namespace weft::transport
