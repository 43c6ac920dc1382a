// What the programs of several workers share: --help, joining the job that weft-run started, leaving it, errors.
//
//   int main(int argc, char** argv) {
//     int steps = 300;
//     examples::Workers workers("parameter_server", "One line about it", {.least = 2, .usual = 3});
//     workers.options.add_option("--steps", steps, "…")->capture_default_str();
//     return workers.run(argc, argv, [](int rank) { return rank == 0 ? "server" : "trainer" + std::to_string(rank); },
//                        [&](weft::rpc::Agent& agent) { if (agent.self().rank == 0) drive(agent, steps); });
//   }
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

#include "command_line.h"

namespace examples {

// Of a call that is a whole training. A worker that is lost meanwhile ends it all the same.
constexpr std::chrono::milliseconds kNoLimit{0};

// How many a program takes.
struct Numbers {
  int least = 2;
  int most = 0;   // 0: any number
  int usual = 0;  // in the command that is shown; 0: the least
};

class Workers {
 public:
  Workers(std::string name, const std::string& description, Numbers numbers)
      : options(description, name),
        name_(std::move(name)),
        numbers_(numbers),
        command_("weft-run --nproc-per-node " + std::to_string(numbers.usual > 0 ? numbers.usual : numbers.least) + " " +
                 name_) {
    options.footer("\nStarted by: " + command_);
    options
        .add_option("--transport", transports_, "Of calls: shm, tcp, … (default: the best that the workers have in common)")
        ->check(transport());
  }

  // Every rank runs the body under the name it is given; all leave together when nothing is left to do. Returns what main
  // does.
  int run(int argc, char** argv, const std::function<std::string(int rank)>& name_of,
          const std::function<void(weft::rpc::Agent&)>& body) {
    parse(options, argc, argv);
    try {
      torch::set_num_threads(1);
      const int rank = weft::launched_rank().value_or(0);
      const int ranks = weft::launched_world_size().value_or(1);
      if (ranks < numbers_.least || (numbers_.most > 0 && ranks > numbers_.most)) {
        throw std::runtime_error("it takes " + std::to_string(numbers_.least) + " workers" +
                                 (numbers_.most == numbers_.least ? "" : " or more") + ", not " + std::to_string(ranks) +
                                 ": " + command_);
      }
      torch::manual_seed(static_cast<std::uint64_t>(rank));  // before anybody can have this worker make a module
      auto agent = weft::rpc::init(name_of(rank), {.transports = transports_});
      body(agent);
      agent.shutdown();
      return 0;
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s: %s\n", name_.c_str(), error.what_without_backtrace());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", name_.c_str(), error.what());
    }
    return 1;
  }

  CLI::App options;

 private:
  std::string name_;
  Numbers numbers_;
  std::string command_;
  std::vector<std::string> transports_;
};

}  // namespace examples
