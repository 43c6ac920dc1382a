// What the programs of several workers share: --help, joining the job that weft-run started,
// leaving it, errors.
//
//   int main(int argc, char** argv) {
//     int steps = 300;
//     examples::Workers workers("parameter_server", "One line about it", {.least = 2, .usual = 3});
//     workers.options.add("--steps", steps, "…");
//     return workers.run(argc, argv, [](int rank) { return rank == 0 ? "server" : "trainer" +
//     std::to_string(rank); },
//                        [&](weft::rpc::Agent& agent) { if (agent.self().rank == 0) drive(agent,
//                        steps); });
//   }
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

#include "options.h"

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
  Workers(const std::string& name, const std::string& description, Numbers numbers);

  // Every rank runs the body under the name it is given; all leave together when nothing is left to
  // do. Returns what main does.
  int run(int argc, char** argv, const std::function<std::string(int rank)>& name_of,
          const std::function<void(weft::rpc::Agent&)>& body);

  Options options;

 private:
  std::string name_;
  Numbers numbers_;
  std::vector<std::string> transports_;
};

}  // namespace examples
