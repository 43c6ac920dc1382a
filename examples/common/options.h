// SPDX-License-Identifier: Apache-2.0
// A program's options: --help, checks whose messages say which values are valid, and exit code 2
// after a mistake.
//
//   int steps = 300;
//   examples::Options options("a_program", "One line about it", 2);
//   options.add("--steps", steps, "Of every trainer", examples::count_from(2));
//   options.parse(argc, argv);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace examples {

// A check of one option's text.
struct Check {
  std::function<std::string(const std::string&)> mistake;  // returns the mistake; "": none
  std::string kind;                                        // shown by --help after the type
};
Check count_from(int least);
Check whole_number();
Check positive_number();
Check share();
Check existing_file();
Check existing_folder();
Check one_of(std::vector<std::string> words);
// Accepts a backend of process groups of this build, or one for each device: "cpu:gloo,cuda:nccl".
Check backend();
// Accepts a transport for calls of this build. The agent checks whether this machine can use it.
Check transport();

class Options {
 public:
  // The target of an option's value. Its present value is the default, which --help shows.
  using Value = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                             std::optional<double>*, std::vector<std::string>*>;

  // `ranks` is the number of ranks in the command that --help shows.
  Options(const std::string& name, const std::string& description, int ranks);
  ~Options();

  template <class T>
  void add(const std::string& option, T& value, const std::string& about, const Check& check = {}) {
    add_to(option, Value(&value), about, check);
  }
  // Adds a check of all options together, called after each has been read; it returns the mistake,
  // or "".
  void require(const std::function<std::string()>& mistake);
  // Parses the command line. Ends the process after --help, and after a mistake.
  void parse(int argc, char** argv);
  // "weft-run --nproc-per-node 2 a_program".
  const std::string& command() const { return command_; }

 private:
  void add_to(const std::string& option, const Value& value, const std::string& about,
              const Check& check);
  struct Parser;  // hides CLI11, which takes longer to compile than most of these programs
  std::unique_ptr<Parser> parser_;
  std::string command_;
};

}  // namespace examples
