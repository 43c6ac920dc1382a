// SPDX-License-Identifier: Apache-2.0
// Reads JSON that others may have written: everything that is missing or of another type throws
// Caller. Internal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace weft::checkpoint {

using nlohmann::json;

// Throws, too, if an object names a key twice: readers differ in which of the two values they take.
json parse_json(std::string_view text);
const json& value_at(const json& object, const char* key);
std::string text_at(const json& object, const char* key);
// Throws for a number that is not an integer from 0 to 2^61.
std::uint64_t count_at(const json& object, const char* key);
std::vector<std::int64_t> numbers_at(const json& object, const char* key);
const json& list_at(const json& object, const char* key);

}  // namespace weft::checkpoint
