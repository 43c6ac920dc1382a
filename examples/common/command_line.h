// What the programs share about their options: checks whose messages say what is taken, --help, exit code 2 after a
// mistake.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <weft/error.h>
#include <weft/transport/registry.h>
#include <weft/transport/routes.h>

namespace examples {

inline void parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 2);
  }
}

// For programs that have no other options: answers --help, refuses everything else.
inline void take_no_options(const std::string& name, const std::string& description, int ranks, int argc, char** argv) {
  CLI::App app(description, name);
  app.footer("\nStarted by: weft-run --nproc-per-node " + std::to_string(ranks) + " " + name);
  parse(app, argc, argv);
}

template <class Number, class Accept>
CLI::Validator number(const std::string& what, Accept accept) {
  const auto check = [what, accept](const std::string& text) -> std::string {
    Number value{};
    const char* const end = text.data() + text.size();
    const auto [stopped, failure] = std::from_chars(text.data(), end, value);
    if (stopped == end && failure == std::errc() && accept(value)) return "";
    return "'" + text + "' is given; it takes " + what;
  };
  return {[check](std::string& text) { return check(text); }, ""};
}

inline CLI::Validator count_from(int least) {
  return number<int>("a whole number of at least " + std::to_string(least), [least](int value) { return value >= least; });
}
inline CLI::Validator whole_number() {
  return number<std::uint64_t>("a whole number of at least 0", [](std::uint64_t) { return true; });
}
inline CLI::Validator positive_number() {
  return number<double>("a number greater than 0", [](double value) { return value > 0 && value <= 1e30; });
}
inline CLI::Validator share() {
  return number<double>("a number from 0 to 1", [](double value) { return value >= 0 && value <= 1; });
}

// A backend of process groups that this build has, or one for each device: "cpu:gloo,cuda:nccl".
inline CLI::Validator backend() {
  const auto check = [](const std::string& text) -> std::string {
    const auto backends = weft::transport::backends();
    std::string known;
    for (const auto& one : backends) known += (known.empty() ? "" : ", ") + std::string(one.name);
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ',');) {
      const std::string name = CLI::detail::to_lower(item.substr(item.find(':') + 1));
      if (std::ranges::none_of(backends, [&](const auto& one) { return one.name == name; })) {
        return "'" + name + "' is given; it takes " + known + ", or one for each device";
      }
    }
    return "";
  };
  return {[check](std::string& text) { return check(text); }, ""};
}
// A transport of calls that this build has. Whether it can be used on this machine is for the agent to say.
inline CLI::Validator transport() {
  const auto check = [](const std::string& name) -> std::string {
    try {
      const weft::transport::Routes found(std::vector<std::string>{name});
    } catch (const weft::Error& error) {
      if (error.blame() == weft::Blame::Caller) return error.text();
    }
    return "";
  };
  return {[check](std::string& name) { return check(name); }, ""};
}

}  // namespace examples
