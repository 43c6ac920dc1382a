// SPDX-License-Identifier: Apache-2.0
// Refuses what cannot be captured into a CUDA graph of a sharded model's step, each with its
// reason. Nothing here blocks. Internal.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/unit.h>

namespace weft::shard {

// True if the current stream of the unit's device is being captured.
bool is_capturing(const Unit& unit);

// Throws Caller unless the captured step averages its own gradients only.
void require_averaging(bool averages);

// Throws Caller unless a forward of these units can be captured now. `is_recorded`: the order in
// which its pass, and the backward behind it, use the units.
void require_capturable(const std::vector<std::shared_ptr<Unit>>& units, bool is_recorded);
// Throws Caller if one of a backward and its forward is captured and the other is not.
void require_captured_alike(bool is_forward, bool is_backward);
// Throws Caller for a parameter that has no gradient on this rank: whether another rank has one is
// read on the host.
void require_gradients(const Unit& unit, const std::vector<std::size_t>& parameters,
                       const std::vector<at::Tensor>& gradients);

}  // namespace weft::shard
