// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>

#include <weft/transport/little_endian.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/tls/plain_text.h>

namespace weft::transport::tcp {

namespace {

// As greeting.h specifies them.
constexpr char kLetters[] = "weft/tcp";
constexpr std::size_t kLettersBytes = 8;
constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kVersionEnd = 12;

using little_endian::get;
using little_endian::put;

}  // namespace

std::string Stripe::text() const {
  if (count == 1) return {};
  return ", socket " + std::to_string(index + 1) + " of " + std::to_string(count);
}

Greeting::Bytes Greeting::encode(const Identity& identity, const Stripe& stripe) {
  Bytes bytes{};
  std::memcpy(bytes.data(), kLetters, kLettersBytes);
  put(bytes.data() + 8, kVersion);
  put(bytes.data() + 12, identity.machine);
  put(bytes.data() + 16, identity.listener);
  put(bytes.data() + 24, stripe.connection_key);
  put(bytes.data() + 32, stripe.index);
  put(bytes.data() + 34, stripe.count);
  return bytes;
}

Greeting::Progress Greeting::receive(tls::Socket& socket) {
  while (count_ < kBytes) {
    const iovec rest{bytes_.data() + count_, kBytes - count_};
    const auto got = socket.receive({&rest, 1});
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Progress::Wants;
    if (got < 0 && errno == EPROTO) {
      failure_ = socket.failure();
      return Progress::Mismatch;
    }
    if (got <= 0) {
      failure_ = got == 0 ? "it closed before it had greeted" : std::strerror(errno);
      return Progress::Lost;
    }
    count_ += static_cast<std::size_t>(got);
    // Checked at once, even if incomplete: a stranger may now wait for an answer.
    failure_ = why_foreign();
    if (!failure_.empty()) return speaks_tls() ? Progress::Mismatch : Progress::Foreign;
  }
  return Progress::Whole;
}

bool Greeting::speaks_tls() const { return count_ > 0 && tls::is_tls(bytes_.front()); }

std::string Greeting::why_foreign() const {
  if (speaks_tls()) return std::string(tls::kPeerSpeaksTls);
  if (std::memcmp(bytes_.data(), kLetters, std::min(count_, kLettersBytes)) != 0)
    return "the other end is not a Weft process";
  if (count_ < kVersionEnd) return {};
  const auto version = get<std::uint32_t>(bytes_.data() + 8);
  if (version != kVersion) {
    return "it speaks version " + std::to_string(version) + " of the greeting, this side " +
           std::to_string(kVersion);
  }
  if (count_ < kBytes) return {};
  const Stripe said = stripe();
  if (said.count >= 1 && said.count <= kMaxSockets && said.index < said.count) return {};
  return "it is socket " + std::to_string(said.index) + " of a connection of " +
         std::to_string(said.count) + " sockets; a connection has 1 to " +
         std::to_string(kMaxSockets) + ", counted from 0";
}

Identity Greeting::identity() const {
  return {get<std::uint32_t>(bytes_.data() + 12), get<std::uint64_t>(bytes_.data() + 16)};
}

Stripe Greeting::stripe() const {
  return {get<std::uint64_t>(bytes_.data() + 24), get<std::uint16_t>(bytes_.data() + 32),
          get<std::uint16_t>(bytes_.data() + 34)};
}

}  // namespace weft::transport::tcp
