// JSON that other processes wrote, which may be cut off or damaged: each field is looked at before
// it is used. All throw Caller with what is wrong; read_json() also names the file, and who reads
// fields does so for what they throw.
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
  std::string mark;    // stands near the beginning of each, so that one that was cut off is known
  std::uintmax_t most_bytes = 0;
};

// An object. One that ends too early is told from a file of another kind.
Json read_json(const std::string& path, const FileKind& kind);
// That what a file says that it is ("flight recorder 1": a word for its kind, and a version) is
// what is wanted.
void require_form(const std::string& path, const FileKind& kind, const Json& form,
                  const std::string& wanted);

const Json& field(const Json& object, const char* name);
const Json& list_of(const Json& object, const char* name);
std::string text_of(const Json& object, const char* name);
std::string text_or_none(const Json& object, const char* name);  // "" where there is no such field
bool flag_of(const Json& object, const char* name);
std::int64_t integer_of(const Json& object, const char* name, std::int64_t least,
                        std::int64_t most);
// 64 bits, which may have been written with or without a sign.
std::uint64_t word_of(const Json& object, const char* name);
// Between -1e15 and 1e15: microseconds of thirty years, with which one can reckon.
double number_of(const Json& object, const char* name);

constexpr int kMostInt = std::numeric_limits<int>::max();
inline int int_of(const Json& object, const char* name, int least = -1) {
  return static_cast<int>(integer_of(object, name, least, kMostInt));
}

}  // namespace weft::tools
