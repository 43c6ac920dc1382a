// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <sstream>

#include <weft/engine/membership/published.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostText = 1024;
constexpr int kLastPort = 65535;

}  // namespace

std::string encode(const Published& address) {
  return address.host + " " + std::to_string(address.port) + " " + address.token + " " +
         std::to_string(address.size) + " " + address.backends;
}

std::optional<Published> decode_published(std::string_view text) {
  if (text.size() > kMostText) return std::nullopt;
  std::istringstream fields{std::string(text)};
  Published one;
  if (!(fields >> one.host >> one.port >> one.token >> one.size)) return std::nullopt;
  fields >> one.backends;
  if (one.port <= 0 || one.port > kLastPort || one.size < 1) return std::nullopt;
  return one;
}

std::string random_token() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) token += std::to_string(device()) + "-";
  return token;
}

std::string name_of_job(const std::string& token) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64,
                static_cast<std::uint64_t>(std::hash<std::string>()(token)));
  return text.data();
}

std::string member_key(int rank) { return kMemberKeys + std::to_string(rank); }

std::vector<std::string> member_keys(int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(member_key(rank));
  return keys;
}

}  // namespace weft::group
