// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <weft/engine/membership/store_message.h>

namespace weft::group {

namespace {

struct Head {
  std::uint64_t number;
  std::int64_t amount;
  std::uint32_t texts;
  std::uint8_t call;
  std::uint8_t is_refused;
  std::uint8_t zero[2];
};
static_assert(sizeof(Head) == 24);

// Takes bytes of that type off the front; false if there are too few.
template <class T>
bool take(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return true;
}

void append(std::string& bytes, const void* value, std::size_t size) {
  bytes.append(static_cast<const char*>(value), size);
}

}  // namespace

std::string encode(const StoreMessage& message) {
  Head head{};
  head.number = message.number;
  head.amount = message.amount;
  head.texts = static_cast<std::uint32_t>(message.texts.size());
  head.call = static_cast<std::uint8_t>(message.call);
  head.is_refused = message.is_refused ? 1 : 0;
  std::string bytes;
  append(bytes, &head, sizeof head);
  for (const std::string& text : message.texts) {
    const auto size = static_cast<std::uint32_t>(text.size());
    append(bytes, &size, sizeof size);
    bytes += text;
  }
  return bytes;
}

std::optional<StoreMessage> decode_store_message(std::string_view bytes) {
  Head head{};
  if (!take(bytes, head)) return std::nullopt;
  if (head.call < static_cast<std::uint8_t>(StoreCall::Set) ||
      head.call > static_cast<std::uint8_t>(StoreCall::Forget) || head.is_refused > 1)
    return std::nullopt;
  StoreMessage message{
      head.number, static_cast<StoreCall>(head.call), head.is_refused == 1, head.amount, {}};
  if (head.texts > bytes.size() / sizeof(std::uint32_t)) return std::nullopt;
  for (std::uint32_t i = 0; i < head.texts; ++i) {
    std::uint32_t size = 0;
    if (!take(bytes, size) || size > bytes.size()) return std::nullopt;
    message.texts.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  if (!bytes.empty()) return std::nullopt;
  return message;
}

}  // namespace weft::group
