// SPDX-License-Identifier: Apache-2.0
// A program that launchers start in the tests. It joins by env://, adds up the ranks, passes a
// message around and prints one line. With an argument, the rank with that number throws instead.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <weft/group.h>

namespace {

void run(int argc, char** argv) {
  auto group = weft::init_process_group({.device = c10::Device(c10::kCPU)});
  const int rank = group.rank();
  const int size = group.size();
  if (argc > 1 && std::atoi(argv[1]) == rank) throw std::runtime_error("thrown on purpose");
  const at::Tensor sum = at::full({1}, rank + 1.0);
  group.all_reduce(sum).wait();
  const at::Tensor received = at::full({1}, -1.0);
  if (size > 1) {
    weft::Work sending = group.send(at::full({1}, 1.0 * rank), (rank + 1) % size);
    group.recv(received, (rank + size - 1) % size).wait();
    sending.wait();
  }
  group.barrier().wait();
  std::printf("rank %d of %d: sum %g, from the left %g\n", rank, size, sum.item<double>(),
              received.item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
