// SPDX-License-Identifier: Apache-2.0
// Option parsing that Weft's commands share. Callable from any thread. Include it only in the .cc
// of a command, because it brings in CLI11.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

#include <CLI/CLI.hpp>

namespace weft::launch {

// Parses the command line. Exits with 0 after --help and --version, and with 2 after a mistake, as
// every command of Weft does.
inline void parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 2);
  }
}

// Accepts a whole number from `least` to `most`. CLI11's own checks report text that is not a
// number as "not in range".
inline CLI::Validator whole_number(std::int64_t least,
                                   std::int64_t most = std::numeric_limits<int>::max()) {
  const auto check = [least, most](const std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stopped, failure] = std::from_chars(text.data(), end, value);
    if (stopped == end && failure == std::errc() && value >= least && value <= most) return "";
    const std::string limits =
        most == std::numeric_limits<int>::max()
            ? "of at least " + std::to_string(least)
            : "from " + std::to_string(least) + " to " + std::to_string(most);
    return "'" + text + "' is given; it takes a whole number " + limits;
  };
  return {[check](std::string& text) { return check(text); }, ""};
}

}  // namespace weft::launch
