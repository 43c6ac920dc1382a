// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <weft/weft.h>

int main() {
  if (weft::version() != WEFT_VERSION) return 1;
  std::printf("%s\n", WEFT_VERSION);
  std::fflush(stdout);  // the ranks are forked and would print it again
  weft::spawn(2, [](int rank, int world_size) {
    auto group = weft::init_process_group();
    torch::nn::Linear net(2, 1);
    weft::DistributedDataParallel ddp(net, group);
    ddp(at::ones({1, 2}) * (rank + 1)).sum().backward();
    if (net->weight.grad()[0][0].item<float>() != 1.5f)
      throw weft::Error(weft::Blame::Caller, "the gradient is not the average");
    if (rank == 0) std::printf("%d ranks\n", world_size);
  });
}
