// SPDX-License-Identifier: Apache-2.0
// The way of gradients from a unit's whole parameters to its shards. At each forward a unit gets
// two nodes of libtorch's graph:
//
//   whole parameters -> UnitNode -> ShardNode -> the shards' gradient accumulators
//
// The engine runs the UnitNode as soon as all gradients of the unit are there; it averages them by
// a reduce-scatter that it does not wait for. The ShardNode has the lowest priority: it waits for
// the result when nothing else of the backward is left to run, so that the reduce-scatter overlaps
// the backward of the units before.
//
// A sharded model owns the GradientReducer; the nodes refer to the model weakly. The model's mutex
// guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/kept_gradients.h>
#include <weft/engine/shard/reduction.h>
#include <weft/engine/shard/unit.h>

namespace weft::shard {

// Gives the unit's whole parameters new nodes, which lead to those of `shards` (all of the unit)
// that require a gradient now. `version`: of the shards, see version_of(); the backward demands it.
// `synchronizes`: the backward averages; otherwise it keeps whole gradients until one does.
void attach_nodes(Unit& unit, const std::vector<at::Tensor>& shards, std::uint64_t version,
                  bool synchronizes);
// The whole parameters require no gradient until attach_nodes().
void detach_nodes(Unit& unit);

// Throws Caller, naming the parameter, for a gradient that is not dense.
void require_dense(const Unit& unit, const std::vector<std::size_t>& parameters,
                   const std::vector<at::Tensor>& gradients);

class GradientReducer {
 public:
  explicit GradientReducer(const std::vector<std::shared_ptr<Unit>>& units);

  // The gradients that backwards inside of no_sync() have kept.
  KeptGradients& kept() { return kept_; }
  // Starts to average gradients, together with those kept. Waits as ReductionOrder::add().
  // `outputs`: by slot, where this rank's rows of the averages will be.
  std::shared_ptr<Reduction> reduce(const Unit& unit, const std::vector<std::size_t>& parameters,
                                    std::vector<at::Tensor> gradients,
                                    std::vector<at::Tensor>& outputs);
  // A new pass begins: drops what a failed backward has begun.
  void forget() { order_->forget(); }

 private:
  KeptGradients kept_;
  const std::shared_ptr<ReductionOrder> order_;
};

}  // namespace weft::shard
