// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/group/access.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/rows.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

using transport::Collective;
using transport::CollectiveKind;

bool are_even(const std::vector<Slice>& slices) {
  return std::ranges::all_of(
      slices, [&](const Slice& slice) { return slice.bytes == slices.front().bytes; });
}

// An all_gather takes parts of one size. Where they differ, every rank sends its part to each.
Op gather(transport::Communicator& ranks, const SpreadRows& rows, transport::Training training,
          const Pin& pin, const Fence& ready) {
  if (are_even(rows.all)) {
    return ranks.run({.kind = CollectiveKind::AllGather,
                      .dtype = Dtype::UInt8,
                      .inputs = {&rows.mine, 1},
                      .outputs = rows.all,
                      .training = training},
                     pin, ready);
  }
  const std::vector<Slice> to_each(rows.all.size(), rows.mine);
  return ranks.all_to_all(rows.all, to_each, Dtype::UInt8, pin, ready);
}

}  // namespace

Work all_gather_rows(const ProcessGroup& group, std::vector<SpreadRows> rows,
                     std::vector<at::Tensor> tensors, std::string what,
                     transport::Training training) {
  const auto fingerprint = [&] { return what + transport::training_text(training); };
  const c10::Device device = tensors.front().device();
  return Core::of(group).operations.issue(
      {.name = "all_gather",
       .fingerprint = fingerprint,
       .device = device,
       .tensors = std::move(tensors),
       .training = training,
       .may_skip = false},
      [&](transport::Communicator& ranks, const Pin& pin, const Fence& ready,
          std::vector<Op>& ops) {
        for (const SpreadRows& each : rows)
          ops.push_back(gather(ranks, each, training, pin, ready));
      });
}

Work reduce_scatter_rows(const ProcessGroup& group, const at::Tensor& output,
                         const at::Tensor& input, const std::vector<std::int64_t>& elements,
                         std::string what, transport::Training training) {
  const transport::Elements to = tensor::elements_of(output);
  const Slice all = tensor::slice_of(input);
  std::vector<Slice> from;
  std::size_t offset = 0;
  for (const std::int64_t count : elements) {
    from.push_back(all.part(offset, static_cast<std::size_t>(count) * size_of(to.dtype)));
    offset += from.back().bytes;
  }
  const auto fingerprint = [&] { return what + transport::training_text(training); };
  return Core::of(group).operations.issue(
      {.name = "reduce_scatter",
       .fingerprint = fingerprint,
       .device = output.device(),
       .tensors = {input, output},
       .reduction = ReduceOp::Sum,
       .training = training,
       .may_skip = false},
      [&](transport::Communicator& ranks, const Pin& pin, const Fence& ready,
          std::vector<Op>& ops) {
        ops.push_back(ranks.run({.kind = CollectiveKind::ReduceScatter,
                                 .dtype = to.dtype,
                                 .op = ReduceOp::Sum,
                                 .inputs = from,
                                 .outputs = {&to.slice, 1},
                                 .training = training},
                                pin, ready));
      });
}

}  // namespace weft::group
