// SPDX-License-Identifier: Apache-2.0
// Deferred replies: a called function that returns a future answers when the future is done, and
// holds no thread until then. Three ways to make the future: by a call of its own with a
// continuation, by a promise, and by a coroutine.
//
//   weft-run --nproc-per-node 3 async_execution
#include <cstdio>

#include "../common/workers.h"

namespace {

using weft::Future;
using weft::rpc::this_agent;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }

// Another worker adds first, then this one.
Future<at::Tensor> add_chained(std::string by, at::Tensor x, at::Tensor y, at::Tensor z) {
  return this_agent().async<&add>(by, x, y).then([z](at::Tensor sum) { return sum + z; });
}

// The caller waits for a future that this function made from a promise.
Future<at::Tensor> add_promised(std::string by, at::Tensor x, at::Tensor y) {
  weft::Promise<at::Tensor> promise;
  this_agent().async<&add>(by, x, y).on_done([promise](Future<at::Tensor> sum) {
    try {
      promise.set(sum.get());
    } catch (...) {
      promise.set_error(std::current_exception());
    }
  });
  return promise.future();
}

// Two steps, one after the other, each on the other worker.
Future<at::Tensor> add_twice(std::string by, at::Tensor x, at::Tensor y, at::Tensor z) {
  const at::Tensor sum = co_await this_agent().async<&add>(by, x, y);
  co_return co_await this_agent().async<&add>(by, sum, z);
}

void show(const char* how, const at::Tensor& sum) {
  std::printf("%s: [%g, %g]\n", how, sum[0].item<double>(), sum[1].item<double>());
}

void run(weft::rpc::Agent& agent) {
  const auto one = torch::ones({2});
  show("a chained call", agent.sync<&add_chained>("worker1", "worker2", one, one, one));
  show("a promise", agent.sync<&add_promised>("worker1", "worker2", one, one));
  show("a coroutine", agent.sync<&add_twice>("worker1", "worker2", one, one, one * 2));
}

}  // namespace

int main(int argc, char** argv) {
  examples::Workers workers("async_execution",
                            "Called functions that answer later, without holding a thread",
                            {.least = 3});
  return workers.run(
      argc, argv, [](int rank) { return "worker" + std::to_string(rank); },
      [](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) run(agent);
      });
}
