// What names contexts, passes and messages between workers.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/engine/call/types.h>
#include <weft/engine/codec/values.h>

namespace weft::autograd {

// The worker that made it in the top 16 bits, its counter below. 0: none.
using ContextId = std::uint64_t;
// The same; one worker's passes are numbered in their order.
using PassId = std::uint64_t;
inline int root_of(PassId pass) { return static_cast<int>(pass >> 48); }

// One message whose tensors gradients flow through.
using rpc::MessageId;

// How a pass ended. Every worker of a pass that fails gets the same.
using rpc::Outcome;

// How many failed passes a message names at most.
constexpr std::size_t kMostNamed = 256;

// A pass, as its messages name it.
struct PassName {
  ContextId context = 0;
  PassId pass = 0;
  PassId settled = 0;  // the root's passes before this one have ended
  PassId plan = 0;     // Exact: which messages count, by the pass that asked for them; 0 for Fast
  bool retain_graph = false;
  std::vector<PassId> failed =
      {};  // passes of the context that have, of which its sender has not made sure that all know
  WEFT_FIELDS(context, pass, settled, plan, retain_graph, failed)
};

}  // namespace weft::autograd
