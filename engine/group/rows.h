// SPDX-License-Identifier: Apache-2.0
// Collectives over tensors whose rows are spread over the ranks. Internal.
//
// Thread-safe like the handle's functions. Nothing blocks for other ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/slice.h>
#include <weft/engine/group/process_group.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/training.h>

namespace weft::group {

// One tensor of a gather: this rank's rows, and the places of all ranks' rows, by rank. The numbers
// of bytes may differ between ranks.
struct SpreadRows {
  Slice mine;
  std::vector<Slice> all;
};

// Gathers several tensors by one operation, each into its own place, so that nothing is copied
// afterwards. `tensors`: the tensors in which the slices lie, on one device; pinned until the
// operation has passed. The first has one size on all ranks. `what` names the tensors for
// WEFT_DEBUG=detail. The ranks compare `training`.
Work all_gather_rows(const ProcessGroup& group, std::vector<SpreadRows> rows,
                     std::vector<at::Tensor> tensors, std::string what,
                     transport::Training training);

// Rank r's `output` receives the sum of all ranks' parts r of `input`, in which the parts lie one
// behind the other. `elements`: of each part, alike on all ranks.
Work reduce_scatter_rows(const ProcessGroup& group, const at::Tensor& output,
                         const at::Tensor& input, const std::vector<std::int64_t>& elements,
                         std::string what, transport::Training training);

}  // namespace weft::group
