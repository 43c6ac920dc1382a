// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <set>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/json_reading.h>

namespace weft::checkpoint {

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 61;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Blame::Caller, "its JSON is damaged: " + why);
}

std::int64_t number_of(const json& value, const char* key) {
  const bool is_large =
      value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(kMost);
  if (!value.is_number_integer() || is_large || value.get<std::int64_t>() < -kMost)
    refuse(std::string("'") + key + "' has a value that is no integer, or too large");
  return value.get<std::int64_t>();
}

}  // namespace

json parse_json(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  std::optional<std::string> twice;
  const auto note = [&](int /*depth*/, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const std::string key = parsed.get<std::string>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  json all = json::parse(text, note, false);
  if (all.is_discarded()) refuse("it cannot be parsed");
  if (twice) refuse("it names '" + *twice + "' twice");
  return all;
}

const json& value_at(const json& object, const char* key) {
  if (!object.is_object() || !object.contains(key))
    refuse(std::string("there is no '") + key + "'");
  return object.at(key);
}

std::string text_at(const json& object, const char* key) {
  const json& value = value_at(object, key);
  if (!value.is_string()) refuse(std::string("'") + key + "' is no string");
  return value.get<std::string>();
}

std::uint64_t count_at(const json& object, const char* key) {
  const std::int64_t number = number_of(value_at(object, key), key);
  if (number < 0) refuse(std::string("'") + key + "' is negative");
  return static_cast<std::uint64_t>(number);
}

std::vector<std::int64_t> numbers_at(const json& object, const char* key) {
  std::vector<std::int64_t> numbers;
  for (const json& value : list_at(object, key)) numbers.push_back(number_of(value, key));
  return numbers;
}

const json& list_at(const json& object, const char* key) {
  const json& value = value_at(object, key);
  if (!value.is_array()) refuse(std::string("'") + key + "' is no list");
  return value;
}

}  // namespace weft::checkpoint
