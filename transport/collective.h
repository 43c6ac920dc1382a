// SPDX-License-Identifier: Apache-2.0
// A collective as one value, which every Communicator takes and every layer below passes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/training.h>

namespace weft::transport {

// The numbers go on the wire: append, never renumber.
enum class CollectiveKind : std::uint8_t {
  Broadcast = 0,      // root's bytes to every rank, in place
  AllReduce = 1,      // in place; bitwise equal on all ranks
  Reduce = 2,         // in place on root; the others' bytes are only read
  AllGather = 3,      // outputs[r] receives rank r's input
  Gather = 4,         // as AllGather, on root; the others have no outputs
  Scatter = 5,        // inputs[r] of root to rank r's output; the others have no inputs
  ReduceScatter = 6,  // inputs[r] of all ranks, reduced, to rank r's output
  AllToAll = 7,       // inputs[r] to rank r, outputs[r] from rank r; sizes differ between pairs
  Barrier = 8,        // no data
};

// "all_reduce".
constexpr std::string_view name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::Broadcast: return "broadcast";
    case CollectiveKind::AllReduce: return "all_reduce";
    case CollectiveKind::Reduce: return "reduce";
    case CollectiveKind::AllGather: return "all_gather";
    case CollectiveKind::Gather: return "gather";
    case CollectiveKind::Scatter: return "scatter";
    case CollectiveKind::ReduceScatter: return "reduce_scatter";
    case CollectiveKind::AllToAll: return "all_to_all";
    case CollectiveKind::Barrier: return "barrier";
  }
  return "unknown";
}

constexpr bool is_in_place(CollectiveKind kind) {
  return kind == CollectiveKind::Broadcast || kind == CollectiveKind::AllReduce ||
         kind == CollectiveKind::Reduce;
}

constexpr bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::AllReduce || kind == CollectiveKind::Reduce ||
         kind == CollectiveKind::ReduceScatter;
}

struct Elements {
  Slice slice;
  Dtype dtype = Dtype::UInt8;
  Training training = {};  // of a broadcast or an all_reduce
  std::size_t count() const { return slice.bytes / size_of(dtype); }
};

// The arguments of one rank. The slices lie with the caller until the call returns; the memory that
// they name lives until the operation has ended.
struct Collective {
  CollectiveKind kind = CollectiveKind::Barrier;
  Dtype dtype = Dtype::UInt8;
  ReduceOp op = ReduceOp::Sum;  // of a kind that reduces
  int root = 0;                 // of a kind that has one
  std::span<const Slice> inputs;
  std::span<const Slice> outputs;  // equal to `inputs` if the kind is in place
  Training training = {};          // of a broadcast or an all_reduce
  // Of an all_to_all: all parts have the same number of bytes here, and on the other ranks if they
  // say so too. Messages between hosts may then be gathered. Ranks may differ in it.
  bool has_equal_parts = false;

  // The only slice of inputs, or of outputs.
  Elements input() const { return {inputs.front(), dtype, training}; }
  Elements output() const { return {outputs.front(), dtype, training}; }
};

}  // namespace weft::transport
