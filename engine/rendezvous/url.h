// SPDX-License-Identifier: Apache-2.0
// An init method: scheme://host:port/path?key=value&…
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <string>

namespace weft::group {

struct Url {
  std::string scheme;
  std::string host;  // without the brackets of an IPv6 address
  std::optional<int> port;
  std::string path;
  std::map<std::string, std::string> query;

  // Throws Caller, quoting the text and the mistake.
  static Url parse(const std::string& text);
  // A number from the query. Throws Caller if the value is not a number.
  std::optional<int> number(const std::string& key) const;
};

constexpr int kMaxPort = 65535;

// Parses "12", and nothing but digits. Throws Caller: "RANK is 'x'; it takes a number from 0 to
// 2147483647".
int to_number(const std::string& what, const std::string& text, int least = 0,
              int most = std::numeric_limits<int>::max());

}  // namespace weft::group
