// An addition on another worker, in the three ways to call: wait for the result, get a future, leave the result there.
//
//   weft-run --nproc-per-node 2 rpc_add
#include <cstdio>
#include <cstdlib>

#include <torch/torch.h>

#include <weft/weft.h>

namespace {

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }

void show(const char* how, const at::Tensor& sum) {
  std::printf("%s: [%g, %g]\n", how, sum[0].item<double>(), sum[1].item<double>());
}

}  // namespace

int main() {
  try {
    const std::string rank = std::getenv("RANK") ? std::getenv("RANK") : "0";
    auto agent = weft::rpc::init("worker" + rank);
    if (agent.self().rank == 0) {
      const auto x = torch::ones({2});
      show("sync", agent.sync<&add>("worker1", x, x * 2));
      show("async", agent.async<&add>("worker1", x, x * 3).get());
      const auto sum = agent.remote<&add>("worker1", x, x * 4);
      std::printf("remote: the result is on %s\n", sum.owner().name.c_str());
      show("remote", sum.to_here());
      show("a registered operator", agent.sync_op("aten::add", "worker1", x, x * 5));
    }
    agent.shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rpc_add: %s\n", error.what());
    return 1;
  }
}
