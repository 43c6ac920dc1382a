// SPDX-License-Identifier: Apache-2.0
// The questions and answers by which ranks use a store that one of them keeps (member_store.h): the
// texts of StoreRequest and StoreReply frames. Peers are not trusted: every field is checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::group {

enum class StoreCall : std::uint8_t {
  Set = 1,         // texts: key, value
  Get = 2,         // texts: keys; answered once all of them exist, with their values
  Add = 3,         // texts: key; number: the amount; the answer's number: the new value
  Check = 4,       // texts: keys; the answer's number: 1 if all of them exist
  CompareSet = 5,  // texts: key, expected, desired; the answer's texts: the value then
  Erase = 6,       // texts: key; the answer's number: 1 if it existed
  Forget = 7,      // number: of the Get that need not be answered; not answered itself
};

struct StoreMessage {
  std::uint64_t number = 0;  // of the call, by the asking rank; the answer has the same
  StoreCall call = StoreCall::Set;
  bool is_refused = false;  // the answer: texts has the reason
  std::int64_t amount = 0;
  std::vector<std::string> texts;
};

std::string encode(const StoreMessage& message);
// Returns nullopt for bytes that are no message.
std::optional<StoreMessage> decode_store_message(std::string_view bytes);

}  // namespace weft::group
