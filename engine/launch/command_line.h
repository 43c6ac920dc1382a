// What Weft's commands share about their options. Any thread; in the .cc of a command only, for
// CLI11's sake.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

#include <CLI/CLI.hpp>

namespace weft::launch {

// Exits with 0 after --help and --version, with 2 after a mistake, which is what every command of
// Weft's does.
inline void parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 2);
  }
}

// The check of an option that takes a whole number. CLI11's own call what is no number "not in
// range".
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
