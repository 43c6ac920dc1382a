// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>
#include <type_traits>
#include <utility>

#include <CLI/CLI.hpp>

#include <weft/group.h>

namespace examples {

namespace {

template <class Number, class Accept>
Check number(const std::string& what, Accept accept) {
  return {[what, accept](const std::string& text) -> std::string {
            Number value{};
            const char* const end = text.data() + text.size();
            const auto [stopped, failure] = std::from_chars(text.data(), end, value);
            if (stopped == end && failure == std::errc() && accept(value)) return "";
            return "'" + text + "' is given; it takes " + what;
          },
          ""};
}

std::string listed(const std::vector<std::string>& words) {
  std::string list;
  for (const std::string& word : words) list += (list.empty() ? "" : ", ") + word;
  return list;
}

// Returns "" for the name of a backend of this build, otherwise the mistake.
std::string why_unknown(const std::string& backend) {
  std::vector<std::string> known;
  for (const weft::BackendInfo& one : weft::available_backends()) known.push_back(one.name);
  if (std::ranges::find(known, backend) != known.end()) return "";
  return "'" + backend + "' is given; it takes " + listed(known);
}

}  // namespace

Check count_from(int least) {
  return number<int>("a whole number of at least " + std::to_string(least),
                     [least](int value) { return value >= least; });
}
Check whole_number() {
  return number<std::uint64_t>("a whole number of at least 0", [](std::uint64_t) { return true; });
}
Check positive_number() {
  return number<double>("a number greater than 0",
                        [](double value) { return value > 0 && value <= 1e30; });
}
Check share() {
  return number<double>("a number from 0 to 1",
                        [](double value) { return value >= 0 && value <= 1; });
}

Check existing_file() {
  return {[](const std::string& path) { return CLI::ExistingFile(path); }, "FILE"};
}
Check existing_folder() {
  return {[](const std::string& path) { return CLI::ExistingDirectory(path); }, "DIR"};
}

Check one_of(std::vector<std::string> words) {
  return {[words](const std::string& word) -> std::string {
            if (std::ranges::find(words, word) != words.end()) return "";
            return "'" + word + "' is given; it takes one of " + listed(words);
          },
          "{" + listed(words) + "}"};
}

Check backend() {
  return {[](const std::string& text) -> std::string {
            std::istringstream items(text);
            for (std::string item; std::getline(items, item, ',');) {
              const std::string why =
                  why_unknown(CLI::detail::to_lower(item.substr(item.find(':') + 1)));
              if (!why.empty()) return why + ", or one for each device";
            }
            return "";
          },
          ""};
}

// Accepts every backend; rpc::init refuses one that has collectives only, such as gloo.
Check transport() { return {why_unknown, ""}; }

struct Options::Parser {
  Parser(const std::string& name, const std::string& description) : app(description, name) {}
  CLI::App app;
};

Options::Options(const std::string& name, const std::string& description, int ranks)
    : parser_(std::make_unique<Parser>(name, description)),
      command_("weft-run --nproc-per-node " + std::to_string(ranks) + " " + name) {
  parser_->app.footer("\nStarted by: " + command_);
}
Options::~Options() = default;

void Options::add_to(const std::string& option, const Value& value, const std::string& about,
                     const Check& check) {
  CLI::Option* const added = std::visit(
      [&](auto* target) {
        using T = std::remove_pointer_t<decltype(target)>;
        if constexpr (std::is_same_v<T, bool>) {
          return parser_->app.add_flag(option, *target, about);
        } else {
          CLI::Option* const plain = parser_->app.add_option(option, *target, about);
          if constexpr (std::is_arithmetic_v<T>) plain->capture_default_str();
          if constexpr (std::is_same_v<T, std::string>) {
            if (!target->empty()) plain->capture_default_str();
          }
          return plain;
        }
      },
      value);
  if (check.mistake) {
    added->check(CLI::Validator(
        [mistake = check.mistake](std::string& text) { return mistake(text); }, check.kind));
  }
}

void Options::require(const std::function<std::string()>& mistake) {
  parser_->app.callback([mistake] {
    if (const std::string found = mistake(); !found.empty()) throw CLI::ValidationError(found);
  });
}

void Options::parse(int argc, char** argv) {
  try {
    parser_->app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(parser_->app.exit(error) == 0 ? 0 : 2);
  }
}

}  // namespace examples
