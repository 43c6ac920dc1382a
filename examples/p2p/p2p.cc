// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages: rank 0 sends 1.0 to rank 1, first blocking, then with requests that are
// waited for later.
//
//   weft-run --nproc-per-node 2 p2p
#include <cstdio>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"

namespace {

void blocking(weft::ProcessGroup& group) {
  auto tensor = torch::zeros({1});
  if (group.rank() == 0) {
    tensor += 1;
    group.send(tensor, 1).wait();
  } else {
    group.recv(tensor, 0).wait();
  }
  std::printf("blocking: rank %d has data %.1f\n", group.rank(), tensor[0].item<float>());
}

void immediate(weft::ProcessGroup& group) {
  auto tensor = torch::zeros({1});
  weft::Work request;
  if (group.rank() == 0) {
    tensor += 1;
    request = group.send(tensor, 1);
    std::printf("immediate: rank 0 started sending\n");
  } else {
    request = group.recv(tensor, 0);
    std::printf("immediate: rank 1 started receiving\n");
  }
  // Until wait() returns, the sender must not write to the tensor and the receiver must not read
  // it.
  request.wait();
  std::printf("immediate: rank %d has data %.1f\n", group.rank(), tensor[0].item<float>());
}

}  // namespace

int main(int argc, char** argv) {
  examples::Options(
      "p2p", "Rank 0 sends a number, first blocking, then with a request that is waited for later",
      2)
      .parse(argc, argv);
  try {
    auto group = weft::init_process_group();
    if (group.size() != 2)
      throw weft::Error(weft::Blame::Caller,
                        "p2p is for two ranks: weft-run --nproc-per-node 2 p2p");
    blocking(group);
    immediate(group);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "p2p: %s\n", error.what());
    return 1;
  }
}
