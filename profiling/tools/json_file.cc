// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <vector>

#include <weft/base/error.h>
#include <weft/profiling/tools/json_file.h>

namespace weft::tools {

namespace {

Error wrong(const char* name, const std::string& what) {
  return {Blame::Caller, "its field '" + std::string(name) + "' " + what};
}

bool has_mark(const std::string& path, const std::string& mark) {
  std::string head(256, '\0');
  std::ifstream file(path);
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<std::size_t>(file.gcount()));
  return head.find(mark) != std::string::npos;
}

// Limits the depth, because copying and printing a Json are recursive. Files of Weft have a depth
// of five.
constexpr int kMostDepth = 32;

// Checks the depth before parsing: the parser's callback would visit a list again for each object
// in it. Both see the same brackets until the first wrong one.
bool is_too_deep(std::ifstream& file) {
  std::vector<char> block(std::size_t{1} << 16);
  std::int64_t depth = 0;
  bool in_text = false;
  bool is_escaped = false;
  do {
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    for (std::streamsize i = 0; i < file.gcount(); ++i) {
      const char byte = block[static_cast<std::size_t>(i)];
      if (in_text) {
        in_text = is_escaped || byte != '"';
        is_escaped = !is_escaped && byte == '\\';
      } else if (byte == '"') {
        in_text = true;
      } else if (byte == '[' || byte == '{') {
        if (++depth > kMostDepth) return true;
      } else if (byte == ']' || byte == '}') {
        --depth;
      }
    }
  } while (file);
  return false;
}

}  // namespace

Json read_json(const std::string& path, const FileKind& kind) {
  const auto refuse = [&](const std::string& why) {
    return Error(Blame::Caller, "'" + path + "' " + why);
  };
  std::error_code failure;
  const auto bytes = std::filesystem::file_size(path, failure);
  if (failure) throw refuse("cannot be read: " + failure.message());
  if (bytes > kind.most_bytes)
    throw refuse("has " + std::to_string(bytes) + " bytes, too many for " + kind.name);
  std::ifstream file(path);
  if (!file) throw refuse("cannot be read; check that this user may read it");
  const auto refuse_kind = [&] { return refuse("is not a " + kind.name + "; " + kind.origin); };
  if (is_too_deep(file)) {
    if (!has_mark(path, kind.mark)) throw refuse_kind();
    throw refuse("is damaged: it has lists more than " + std::to_string(kMostDepth) + " deep");
  }
  file.clear();
  file.seekg(0);
  try {
    Json json = Json::parse(file);
    if (!json.is_object()) throw refuse_kind();
    return json;
  } catch (const Json::parse_error& error) {
    if (!has_mark(path, kind.mark)) throw refuse_kind();
    if (error.byte >= bytes)
      throw refuse("ends in the middle, after " + std::to_string(bytes) +
                   " bytes: it was cut off, or is still being written");
    throw refuse("is damaged at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    throw refuse("is damaged: a number in it is too large");
  }
}

void require_form(const std::string& path, const FileKind& kind, const Json& form,
                  const std::string& wanted) {
  if (form == wanted) return;
  const std::string text = form.is_string() ? form.get<std::string>() : "";
  if (text.starts_with(wanted.substr(0, wanted.rfind(' ') + 1))) {
    throw Error(Blame::Caller, "'" + path + "' is of another version of Weft: it is a '" + text +
                                   "', and this program reads '" + wanted +
                                   "'; use the program of that version");
  }
  throw Error(Blame::Caller, "'" + path + "' is not a " + kind.name + "; " + kind.origin);
}

const Json& field(const Json& object, const char* name) {
  if (!object.is_object())
    throw Error(Blame::Caller,
                "a value that should have a field '" + std::string(name) + "' is not an object");
  const auto found = object.find(name);
  if (found == object.end()) throw wrong(name, "is missing");
  return *found;
}

const Json& list_of(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (!value.is_array()) throw wrong(name, "is not a list");
  return value;
}

std::string text_of(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (!value.is_string()) throw wrong(name, "is not a text");
  return value.get<std::string>();
}

std::string text_or_none(const Json& object, const char* name) {
  return object.is_object() && object.contains(name) ? text_of(object, name) : "";
}

bool flag_of(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (!value.is_boolean()) throw wrong(name, "is neither true nor false");
  return value.get<bool>();
}

std::int64_t integer_of(const Json& object, const char* name, std::int64_t least,
                        std::int64_t most) {
  const Json& value = field(object, name);
  if (!value.is_number_integer()) throw wrong(name, "is not an integer");
  const bool is_too_large =
      value.is_number_unsigned() &&
      value.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
  const std::int64_t number = is_too_large ? 0 : value.get<std::int64_t>();
  if (is_too_large || number < least || number > most)
    throw wrong(name, "is out of range: " + value.dump());
  return number;
}

std::uint64_t word_of(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (!value.is_number_integer()) throw wrong(name, "is not an integer");
  return value.is_number_unsigned() ? value.get<std::uint64_t>()
                                    : static_cast<std::uint64_t>(value.get<std::int64_t>());
}

double number_of(const Json& object, const char* name) {
  constexpr double kMost = 1e15;
  const Json& value = field(object, name);
  if (!value.is_number()) throw wrong(name, "is not a number");
  const double number = value.get<double>();
  if (!(number >= -kMost && number <= kMost)) throw wrong(name, "is out of range: " + value.dump());
  return number;
}

}  // namespace weft::tools
