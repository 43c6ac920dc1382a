// SPDX-License-Identifier: Apache-2.0
// How an end that speaks TLS and one that speaks plain text tell each other so.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace weft::transport::tls {

// The first byte of a TLS connection, in which a handshake begins, and that of an alert.
inline constexpr unsigned char kHandshake = 0x16;
inline constexpr unsigned char kAlert = 0x15;
constexpr bool is_tls(std::byte first) {
  return first == std::byte{kHandshake} || first == std::byte{kAlert};
}

// Either answers the other's first bytes with this record, a fatal alert. Two ends that both speak
// TLS 1.3 never send it.
inline constexpr unsigned char kProtocolVersion = 70;
inline constexpr std::array<unsigned char, 7> kMismatch{kAlert, 3, 3, 0, 2, 2, kProtocolVersion};

inline constexpr std::string_view kPeerIsPlain =
    "it does not speak TLS 1.3, and this process does: set WEFT_TLS_CERT, WEFT_TLS_KEY and "
    "WEFT_TLS_CA for all ranks and workers, or for none";
inline constexpr std::string_view kPeerSpeaksTls =
    "it speaks TLS, and this process does not: set WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA for "
    "all ranks and workers, or for none";

}  // namespace weft::transport::tls
