// SPDX-License-Identifier: Apache-2.0
// All-reduce built from send and recv on a ring of ranks, in two ways:
//
//   whole    size - 1 rounds. In each, every rank sends the tensor that it received last to its
//            right and adds the one that it receives from its left. Every rank sends (size - 1)
//            times the whole tensor.
//   chunked  the tensor in `size` chunks: size - 1 rounds that reduce, after which each rank holds
//            one finished chunk, and size - 1 rounds that pass the finished chunks around. Every
//            rank sends 2 (size - 1) / size of the tensor.
//
// (A widely copied listing of this never loads its send buffer, and adds the wrong one.)
//
//   weft-run --nproc-per-node 4 ring_all_reduce
#include <cstdio>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"

namespace {

int left_of(const weft::ProcessGroup& group) {
  return (group.rank() + group.size() - 1) % group.size();
}
int right_of(const weft::ProcessGroup& group) { return (group.rank() + 1) % group.size(); }

// Sends one tensor to the right while receiving another from the left.
void pass(weft::ProcessGroup& group, const torch::Tensor& out, torch::Tensor& in) {
  auto sent = group.send(out, right_of(group));
  group.recv(in, left_of(group)).wait();
  sent.wait();
}

void ring_all_reduce(weft::ProcessGroup& group, torch::Tensor& tensor) {
  if (group.size() == 1) return;
  auto outgoing = tensor.clone();
  auto incoming = torch::empty_like(tensor);
  for (int round = 1; round < group.size(); ++round) {
    pass(group, outgoing, incoming);
    tensor += incoming;
    std::swap(outgoing, incoming);  // sends the received tensor on in the next round
  }
}

void chunked_ring_all_reduce(weft::ProcessGroup& group, torch::Tensor& tensor) {
  const int size = group.size();
  if (size == 1) return;
  // Chunks may be empty or of different sizes; all ranks cut in the same places.
  auto chunks = tensor.flatten().tensor_split(size);
  const auto chunk = [&](int index) -> torch::Tensor& {
    return chunks[static_cast<std::size_t>((index % size + size) % size)];
  };
  for (int round = 0; round < size - 1; ++round) {
    auto incoming = torch::empty_like(chunk(group.rank() - round - 1));
    pass(group, chunk(group.rank() - round), incoming);
    chunk(group.rank() - round - 1) += incoming;
  }
  for (int round = 0; round < size - 1; ++round) {
    pass(group, chunk(group.rank() + 1 - round), chunk(group.rank() - round));
  }
}

void check(weft::ProcessGroup& group, const char* name,
           void (*all_reduce)(weft::ProcessGroup&, torch::Tensor&)) {
  torch::manual_seed(group.rank());
  auto tensor = torch::randn({10'007}, torch::kDouble);
  auto expected = tensor.clone();
  group.all_reduce(expected).wait();
  all_reduce(group, tensor);
  const double difference = (tensor - expected).abs().max().item<double>();
  if (difference > 1e-9)
    throw std::runtime_error(std::string(name) + " differs from all_reduce by " +
                             std::to_string(difference));
  auto ones = torch::ones({4});
  all_reduce(group, ones);
  std::printf("%s: rank %d has %.0f %.0f %.0f %.0f\n", name, group.rank(), ones[0].item<float>(),
              ones[1].item<float>(), ones[2].item<float>(), ones[3].item<float>());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  examples::Options("ring_all_reduce", "all_reduce written with send and recv, whole and in chunks",
                    4)
      .parse(argc, argv);
  try {
    auto group = weft::init_process_group();
    check(group, "whole", ring_all_reduce);
    check(group, "chunked", chunked_ring_all_reduce);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ring_all_reduce: %s\n", error.what());
    return 1;
  }
}
