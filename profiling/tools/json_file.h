// SPDX-License-Identifier: Apache-2.0
// Reads JSON that other processes wrote, which may be cut off or damaged: each field is checked
// before it is used. All functions throw Caller with what is wrong; read_json() also names the
// file, and callers that read fields add it themselves.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include <nlohmann/json.hpp>

namespace weft::tools {

using Json = nlohmann::json;

struct FileKind {
  std::string name;    // "a timeline of Weft"
  std::string origin;  // how one is made
  // Text near the beginning of each file, by which a file that was cut off is recognized.
  std::string mark;
  std::uintmax_t most_bytes = 0;
};

// Reads a JSON object. The error distinguishes a file that ends too early from a file of another
// kind.
Json read_json(const std::string& path, const FileKind& kind);
// Checks that a file's form ("flight recorder 1": its kind and a version) is the wanted one.
void require_form(const std::string& path, const FileKind& kind, const Json& form,
                  const std::string& wanted);

const Json& field(const Json& object, const char* name);
const Json& list_of(const Json& object, const char* name);
std::string text_of(const Json& object, const char* name);
std::string text_or_none(const Json& object, const char* name);  // "" without such a field
bool flag_of(const Json& object, const char* name);
std::int64_t integer_of(const Json& object, const char* name, std::int64_t least,
                        std::int64_t most);
// 64 bits, written with or without a sign.
std::uint64_t word_of(const Json& object, const char* name);
// A number between -1e15 and 1e15, which is safe for arithmetic: thirty years in microseconds.
double number_of(const Json& object, const char* name);

constexpr int kMostInt = std::numeric_limits<int>::max();
inline int int_of(const Json& object, const char* name, int least = -1) {
  return static_cast<int>(integer_of(object, name, least, kMostInt));
}

}  // namespace weft::tools
