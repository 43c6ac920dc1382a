// SPDX-License-Identifier: Apache-2.0
// A parameter server: one worker holds the model, the others train it. Two ways:
//
//   weft-run --nproc-per-node 3 parameter_server
//       averaging.h: averages all trainers' gradients, step by step
//   weft-run --nproc-per-node 3 parameter_server --mode hogwild
//       hogwild.h: distributed autograd, without waiting
#include <cstdio>

#include "../common/workers.h"
#include "averaging.h"
#include "hogwild.h"

namespace {

using Losses = std::pair<double, double>;

void drive(weft::rpc::Agent& agent, const std::string& mode, int steps) {
  const int trainers = static_cast<int>(agent.workers().size()) - 1;
  std::vector<weft::Future<Losses>> runs;
  const auto start = [&]<auto Train>(const auto& server) {
    for (int trainer = 1; trainer <= trainers; ++trainer) {
      runs.push_back(
          agent.async<Train>(weft::rpc::to(trainer).timeout(examples::kNoLimit), server, steps));
    }
  };
  if (mode == "average") {
    start.operator()<&averaging::train>(agent.remote<averaging::Server>(agent.self(), trainers));
  } else {
    start.operator()<&hogwild::train>(agent.remote<NetImpl>(agent.self()));
  }
  for (int trainer = 1; trainer <= trainers; ++trainer) {
    const auto [first, last] = runs[static_cast<std::size_t>(trainer - 1)].get();
    std::printf("trainer%d: loss %.4f at the first step, %.4f at the last\n", trainer, first, last);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = "average";
  int steps = 300;
  examples::Workers workers("parameter_server", "One worker holds the model, the others train it",
                            {.least = 2, .usual = 3});
  workers.options.add("--mode", mode,
                      "average: all trainers' gradients, step by step; hogwild: each as it comes",
                      examples::one_of({"average", "hogwild"}));
  workers.options.add("--steps", steps, "Steps of every trainer, at least 2",
                      examples::count_from(2));
  return workers.run(
      argc, argv, [](int rank) { return rank == 0 ? "server" : "trainer" + std::to_string(rank); },
      [&](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) drive(agent, mode, steps);
      });
}
