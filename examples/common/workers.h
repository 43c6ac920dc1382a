// SPDX-License-Identifier: Apache-2.0
// Shared by the programs with several workers: --help, joining the job that weft-run started,
// leaving it, errors.
//
//   int main(int argc, char** argv) {
//     int steps = 300;
//     examples::Workers workers("parameter_server", "One line about it", {.least = 2, .usual = 3});
//     workers.options.add("--steps", steps, "…");
//     return workers.run(
//         argc, argv,
//         [](int rank) { return rank == 0 ? "server" : "trainer" + std::to_string(rank); },
//         [&](weft::rpc::Agent& agent) {
//           if (agent.self().rank == 0) drive(agent, steps);
//         });
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

// The timeout of a call that is a whole training. The call still ends if its worker is lost.
constexpr std::chrono::milliseconds kNoLimit{0};

// How many workers a program takes.
struct Numbers {
  int least = 2;
  int most = 0;   // 0: no maximum
  int usual = 0;  // number in the command that --help shows; 0: `least`
};

class Workers {
 public:
  Workers(const std::string& name, const std::string& description, Numbers numbers);

  // Every rank runs the body, under the name that `name_of` returns; all ranks leave together when
  // no calls are left. Returns the exit code for main().
  int run(int argc, char** argv, const std::function<std::string(int rank)>& name_of,
          const std::function<void(weft::rpc::Agent&)>& body);

  Options options;

 private:
  std::string name_;
  Numbers numbers_;
  std::vector<std::string> transports_;
};

}  // namespace examples
