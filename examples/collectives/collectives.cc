// SPDX-License-Identifier: Apache-2.0
// The six collectives, each followed by the values on every rank. The values show where they come
// from.
//
//   weft-run --nproc-per-node 3 collectives
#include <cstdio>
#include <sstream>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"

namespace {

std::string text_of(const torch::Tensor& tensor) {
  std::ostringstream text;
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    text << (i == 0 ? "" : " ") << tensor.flatten()[i].item<float>();
  return text.str();
}

// Rank 0 prints the values of all ranks, in order.
void show(weft::ProcessGroup& group, const char* name, const torch::Tensor& mine) {
  auto all = torch::empty({group.size(), mine.numel()});
  group.all_gather_into(all, mine.contiguous()).wait();
  if (group.rank() != 0) return;
  std::printf("%s\n", name);
  for (int rank = 0; rank < group.size(); ++rank)
    std::printf("  rank %d: %s\n", rank, text_of(all[rank]).c_str());
}

torch::Tensor own(const weft::ProcessGroup& group) { return torch::full({2}, group.rank() + 1.0f); }

}  // namespace

int main(int argc, char** argv) {
  examples::Options("collectives", "The collectives, with the values of each rank before and after",
                    3)
      .parse(argc, argv);
  try {
    auto group = weft::init_process_group();
    const int rank = group.rank();
    const int size = group.size();
    show(group, "before: rank r holds r + 1", own(group));

    auto tensor = own(group);
    group.broadcast(tensor, 0).wait();
    show(group, "broadcast from rank 0", tensor);

    tensor = own(group);
    group.reduce(tensor, 0, weft::ReduceOp::Sum).wait();
    show(group, "reduce (sum) to rank 0: the others keep theirs", tensor);

    tensor = own(group);
    group.all_reduce(tensor, weft::ReduceOp::Sum).wait();
    show(group, "all_reduce (sum)", tensor);

    std::vector<torch::Tensor> parts;
    if (rank == 0) {
      for (int i = 0; i < size; ++i)
        parts.push_back(torch::full({2}, 10.0f * static_cast<float>(i)));
    }
    tensor = torch::zeros({2});
    group.scatter(tensor, parts, 0).wait();
    show(group, "scatter from rank 0: rank r receives 10 r", tensor);

    parts.clear();
    if (rank == 0) parts.assign(static_cast<std::size_t>(size), torch::Tensor());
    for (auto& part : parts) part = torch::zeros({2});
    group.gather(parts, own(group), 0).wait();
    show(group, "gather to rank 0 (the others show nothing received)",
         rank == 0 ? torch::cat(parts) : torch::zeros({2 * size}));

    parts.assign(static_cast<std::size_t>(size), torch::Tensor());
    for (auto& part : parts) part = torch::zeros({2});
    group.all_gather(parts, own(group)).wait();
    show(group, "all_gather", torch::cat(parts));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "collectives: %s\n", error.what());
    return 1;
  }
}
