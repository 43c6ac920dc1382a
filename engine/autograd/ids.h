// SPDX-License-Identifier: Apache-2.0
// Names of contexts, passes and messages between workers.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/engine/call/types.h>
#include <weft/engine/codec/values.h>

namespace weft::autograd {

// The rank of the worker that made it in the top 16 bits, that worker's counter below. 0: none.
using ContextId = std::uint64_t;
// As ContextId; one worker's passes are numbered in their order.
using PassId = std::uint64_t;
inline int root_of(PassId pass) { return static_cast<int>(pass >> 48); }

// One message whose tensors gradients flow through.
using call::MessageId;

// How a pass ended. All workers of a failed pass get the same outcome.
using call::Outcome;

// The greatest number of failed passes that a message names.
constexpr std::size_t kMostNamed = 256;

// Names a pass in messages.
struct PassName {
  ContextId context = 0;
  PassId pass = 0;
  PassId settled = 0;  // the root's passes before this one have ended
  PassId plan = 0;     // Exact: the pass that asked which messages count; 0 for Fast
  bool retain_graph = false;
  // Failed passes of the context that some worker may not know of, as far as the sender can tell.
  std::vector<PassId> failed = {};
  WEFT_FIELDS(context, pass, settled, plan, retain_graph, failed)
};

}  // namespace weft::autograd
