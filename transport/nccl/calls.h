// SPDX-License-Identifier: Apache-2.0
// Communicator's operations as NCCL calls. An operation that NCCL lacks becomes a group of calls:
// sends and receives, or one broadcast or reduce for each rank. Operations that only move data send
// bytes, so they work for every dtype; reductions need a dtype that NCCL knows.
#pragma once

#include <optional>
#include <span>

#include <weft/transport/communicator.h>
#include <weft/transport/nccl/handle.h>

namespace weft::transport::nccl {

// How NCCL reduces elements of a dtype. Complex numbers are pairs of reals, so their count doubles;
// the sum of booleans is "any" and their product "all", as in torch.
struct Reduction {
  ncclDataType_t type;
  ncclRedOp_t op;
  std::size_t element_bytes;
};
// Empty if NCCL has no such reduction: bitwise operators, 16-bit integers, products and comparisons
// of complex numbers, averages of integers.
std::optional<Reduction> reduction_of(Dtype dtype, ReduceOp op);

using Slices = std::span<const Slice>;

Handle::Call all_reduce(const Slice& data, const Reduction& reduction);
Handle::Call all_to_all(Slices outputs, Slices inputs);
// Any kind but Barrier. `reduction` is set for a kind that reduces.
Handle::Call call_of(const Collective& collective, const std::optional<Reduction>& reduction,
                     int rank);
Handle::Call send(const Slice& data, int to);
Handle::Call recv(const Slice& data, int from);

}  // namespace weft::transport::nccl
