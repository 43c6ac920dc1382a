// SPDX-License-Identifier: Apache-2.0
// ProcessGroupOptions::secret on the connections of a mesh. If the group has one, the first
// messages of a connection are those of transport/challenge.h, each behind "wftc", a version (2
// bytes, 1) and 2 bytes of 0. The connecting rank sends its hello behind its proof. The purpose is
// "weft group challenge 1"; the proofs also cover the group's token (16 bytes), its number of ranks
// (4) and the rank that listens (4), so they prove nothing to another group or to another rank.
#pragma once

#include <optional>
#include <vector>

#include <weft/transport/challenge.h>
#include <weft/transport/connection.h>
#include <weft/transport/mesh/wire.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

// The challenge on one end of a connection to the rank `listener`; nothing if the group has no
// secret.
std::optional<Challenge> challenge_of(const JoinOptions& options, const Token& token, Side own,
                                      int listener);

constexpr std::uint32_t kChallengeMagic = 0x63746677;  // "wftc"
constexpr std::uint16_t kChallengeVersion = 1;

std::vector<std::byte> encode_challenge(Bytes body);
// Returns the body, which lies in `header`.
Result<Bytes> decode_challenge(Bytes header);

// Sends the connector's first message. Throws Busy if the system gives no random bytes.
void send_opening(Challenge& challenge, Connection& connection);
// Reads the peer's next message and sends the answer to it. Returns why the peer is refused. The
// caller still has to accept the arrival.
std::optional<std::string> answer_challenge(Challenge& challenge, Connection& connection,
                                            const Arrival& arrival);

}  // namespace weft::transport::mesh
