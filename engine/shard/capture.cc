// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <weft/base/error.h>
#include <weft/engine/group/core.h>
#include <weft/engine/shard/capture.h>

namespace weft::shard {

namespace {

Error refused(const std::string& what, const std::string& why) {
  return {Blame::Caller, what +
                             " of a FullyShardedDataParallel cannot be captured into a CUDA graph, "
                             "but the current stream is being captured: " +
                             why};
}

}  // namespace

bool is_capturing(const Unit& unit) {
  if (!unit.device().is_cuda()) return false;
  return tensor::CudaDevices::is_captured(
      group::Core::of(unit.group()).options.job->devices->ready(unit.device()));
}

void require_capturable(const std::vector<std::shared_ptr<Unit>>& units, bool is_recorded) {
  for (const auto& unit : units) {
    if (unit->offloads()) {
      throw refused("a step",
                    "FullyShardOptions::offload keeps the shards in host memory, and the host "
                    "waits for their gradients in each step; capture models without offload");
    }
    if (unit->state() == Unit::State::Sharded || unit->is_held()) continue;
    throw refused("a forward",
                  "unit '" + unit->name() +
                      "' is still gathered by an earlier forward, whose backward has not run; run "
                      "it before the capture, and wait for the device");
  }
  if (is_recorded) return;
  throw refused("the first step",
                "the order in which it uses its units is not known yet, so nothing would be "
                "gathered ahead at any launch; run two steps before the capture, and wait for the "
                "device");
}

void require_averaging(bool averages) {
  if (averages) return;
  throw refused("a step with no_sync()",
                "a launch would add to gradients that another launch, or a step outside of the "
                "graph, has kept; average gradients in each captured step");
}

void require_captured_alike(bool is_forward, bool is_backward) {
  if (is_forward == is_backward) return;
  throw Error(Blame::Caller,
              is_forward ? "the forward of a FullyShardedDataParallel was captured into a CUDA "
                           "graph and its backward is not: what the forward has gathered is there "
                           "at launches only; capture both into one graph"
                         : "the backward of a FullyShardedDataParallel is captured into a CUDA "
                           "graph and its forward was not; capture both into one graph");
}

void require_gradients(const Unit& unit, const std::vector<std::size_t>& parameters,
                       const std::vector<at::Tensor>& gradients) {
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    if (gradients[slot].defined()) continue;
    throw refused("this backward", "parameter '" + unit.parameters()[parameters[slot]].name +
                                       "' has no gradient on this rank, and the host would have to "
                                       "read whether another rank has one; use all parameters in "
                                       "captured steps, or freeze it (requires_grad_(false))");
  }
}

}  // namespace weft::shard
