// SPDX-License-Identifier: Apache-2.0
// An addition on another worker, in the three ways to call: wait for the result, get a future,
// leave the result on the other worker.
//
//   weft-run --nproc-per-node 2 rpc_add
#include <cstdio>

#include "../common/workers.h"

namespace {

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }

void show(const char* how, const at::Tensor& sum) {
  std::printf("%s: [%g, %g]\n", how, sum[0].item<double>(), sum[1].item<double>());
}

void run(weft::rpc::Agent& agent) {
  const auto x = torch::ones({2});
  show("sync", agent.sync<&add>("worker1", x, x * 2));
  show("async", agent.async<&add>("worker1", x, x * 3).get());
  const auto sum = agent.remote<&add>("worker1", x, x * 4);
  std::printf("remote: the result is on %s\n", sum.owner().name.c_str());
  show("remote", sum.to_here());
  show("a registered operator", agent.sync_op("aten::add", "worker1", x, x * 5));
}

}  // namespace

int main(int argc, char** argv) {
  examples::Workers workers("rpc_add", "One addition on another worker, called in each of the ways",
                            {.least = 2});
  return workers.run(
      argc, argv, [](int rank) { return "worker" + std::to_string(rank); },
      [](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) run(agent);
      });
}
