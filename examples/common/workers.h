// What the programs of several workers share: --help, joining the job that weft-run started, leaving it, errors.
//
//   int main(int argc, char** argv) {
//     int steps = 300;
//     examples::Workers workers("parameter_server", "One line about it", 3);
//     workers.options.add_option("--steps", steps, "…")->capture_default_str();
//     return workers.run(argc, argv, [](int rank) { return rank == 0 ? "server" : "trainer" + std::to_string(rank); },
//                        [&](weft::rpc::Agent& agent) { if (agent.self().rank == 0) drive(agent, steps); });
//   }
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <torch/torch.h>

#include <weft/weft.h>

namespace examples {

class Workers {
 public:
  // `most` = 0: any number from `least` on.
  Workers(std::string name, const std::string& description, int least, int most = 0)
      : options(description, name), name_(std::move(name)), least_(least), most_(most) {
    options.footer("\nStarted by: weft-run --nproc-per-node " + std::to_string(least) + " " + name_);
    options.add_option("--transport", transports_,
                       "Of calls: shm, tcp, … (default: the best that the workers have in common)");
  }

  // Every rank runs the body under the name it is given; all leave together when nothing is left to do. Returns what main
  // does.
  int run(int argc, char** argv, const std::function<std::string(int rank)>& name_of,
          const std::function<void(weft::rpc::Agent&)>& body) {
    CLI11_PARSE(options, argc, argv);
    try {
      torch::set_num_threads(1);
      const int rank = number("RANK", 0);
      const int ranks = number("WORLD_SIZE", 1);
      if (ranks < least_ || (most_ > 0 && ranks > most_)) {
        throw std::runtime_error("it takes " + std::to_string(least_) + " workers" + (most_ == least_ ? "" : " or more") +
                                 ", not " + std::to_string(ranks) + ": weft-run --nproc-per-node " +
                                 std::to_string(least_) + " " + name_);
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
  static int number(const char* variable, int otherwise) {
    const char* text = std::getenv(variable);
    return text == nullptr ? otherwise : std::atoi(text);
  }

  std::string name_;
  int least_;
  int most_;
  std::vector<std::string> transports_;
};

}  // namespace examples
