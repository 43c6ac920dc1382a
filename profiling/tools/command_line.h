// SPDX-License-Identifier: Apache-2.0
// Code that the command lines of these programs share: one exit code for every mistake, and a
// message that names an unknown subcommand.
#pragma once

#include <cerrno>
#include <cstdio>
#include <exception>
#include <string>

#include <CLI/CLI.hpp>

#include <weft/base/error.h>
#include <weft/base/make_error.h>

namespace weft::tools {

constexpr int kWrong = 2;  // exit code for a wrong command line or file

// The first word that is neither an option of the program nor a subcommand; "" if a subcommand was
// given.
inline std::string unknown_word(const CLI::App& app) {
  if (!app.get_subcommands().empty()) return "";
  const auto left = app.remaining();
  return left.empty() ? "" : left.front();
}

inline std::string subcommands_of(const CLI::App& app) {
  std::string names;
  for (const CLI::App* one : app.get_subcommands(nullptr))
    names += (names.empty() ? "" : ", ") + one->get_name();
  return names;
}

// Parses the command line and runs `program`. Returns its exit code, or kWrong after an exception
// or if the output cannot be written.
template <class Program>
int run_program(CLI::App& app, int argc, char** argv, Program program) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const std::string word = unknown_word(app);
    if (word.empty()) {
      app.exit(error);
    } else {
      std::fprintf(stderr, "%s: unknown subcommand '%s'; use one of %s (--help tells more)\n",
                   app.get_name().c_str(), word.c_str(), subcommands_of(app).c_str());
    }
    return kWrong;
  }
  try {
    const int code = program();
    if (std::fflush(stdout) != 0)
      throw system_error(Blame::Caller, "the output cannot be written", errno);
    return code;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), error.text().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), error.what());
  }
  return kWrong;
}

}  // namespace weft::tools
