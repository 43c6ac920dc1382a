// A program's options: --help, checks whose messages say what is taken, exit code 2 after a
// mistake.
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

// Of one option's text.
struct Check {
  std::function<std::string(const std::string&)> mistake;  // "": none
  std::string kind;                                        // for --help, behind the type
};
Check count_from(int least);
Check whole_number();
Check positive_number();
Check share();
Check existing_file();
Check existing_folder();
Check one_of(std::vector<std::string> words);
// A backend of process groups that this build has, or one for each device: "cpu:gloo,cuda:nccl".
Check backend();
// A transport of calls that this build has. Whether it can be used on this machine is for the agent
// to say.
Check transport();

class Options {
 public:
  // Where an option's value goes. What is there before is its default, and shown by --help.
  using Value = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                             std::optional<double>*, std::vector<std::string>*>;

  // `ranks`: in the command that --help shows.
  Options(const std::string& name, const std::string& description, int ranks);
  ~Options();

  template <class T>
  void add(const std::string& option, T& value, const std::string& about, const Check& check = {}) {
    add_to(option, Value(&value), about, check);
  }
  // Of all together, once each is read: gives the mistake, or "".
  void require(const std::function<std::string()>& mistake);
  // Ends the process after --help, and after a mistake.
  void parse(int argc, char** argv);
  // "weft-run --nproc-per-node 2 a_program".
  const std::string& command() const { return command_; }

 private:
  void add_to(const std::string& option, const Value& value, const std::string& about,
              const Check& check);
  struct Parser;  // CLI11, which takes longer to compile than most programs here
  std::unique_ptr<Parser> parser_;
  std::string command_;
};

}  // namespace examples
