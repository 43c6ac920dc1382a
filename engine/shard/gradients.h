// SPDX-License-Identifier: Apache-2.0
// The way of gradients from a unit's whole parameters to its shards. At each forward a unit gets
// two nodes of libtorch's graph:
//
//   whole parameters -> UnitNode -> ShardNode -> the shards' gradient accumulators
//
// The engine runs the UnitNode as soon as all gradients of the unit are there; it averages them by
// a reduce-scatter that it does not wait for. The ShardNode has the lowest priority: it waits for
// the result when nothing else of the backward is left to run, so that the reduce-scatter overlaps
// the backward of the units before. Over a mesh of two axes the rows are then summed over the ranks
// that have the same ones, by an all-reduce that starts when the next unit's reduce-scatter has
// started, or else when a ShardNode waits for it.
//
// A sharded model owns the GradientReducer; the nodes refer to the model weakly. The model's mutex
// guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/work.h>
#include <weft/engine/shard/unit.h>

namespace weft::shard {

// Gives the unit's whole parameters new nodes, which lead to those of `shards` (all of the unit)
// that require a gradient now. `synchronizes`: the backward averages; otherwise it keeps whole
// gradients until one does.
void attach_nodes(Unit& unit, const std::vector<at::Tensor>& shards, bool synchronizes);
// The whole parameters require no gradient until attach_nodes().
void detach_nodes(Unit& unit);

// One reduce-scatter, and the all-reduce behind it; or several if the gradients differ in dtype.
struct Reduction {
  struct Bucket {
    at::ScalarType dtype = at::kFloat;
    std::vector<std::size_t> slots;  // positions in `parameters` of reduce()
    at::Tensor output;               // this rank's rows, then for each slot how many ranks used it
    Work work;                       // the last operation that has been started
  };
  // The host (CPU) or the current stream (CUDA) waits for the reduce-scatter. The first call starts
  // the all-reduce. Throws the operation's error.
  void advance();
  // The same, and it waits for the all-reduce.
  void wait();
  // This rank's rows of the averages, by slot; undefined where no rank has brought a gradient.
  // Call it after wait().
  void finish(std::vector<at::Tensor>& gradients, const std::vector<at::ScalarType>& dtypes) const;

  std::vector<Bucket> buckets;
  ProcessGroup replicas;   // for the all-reduce; empty: there is none
  std::uint32_t unit = 0;  // its number
  bool has_advanced = false;
  std::vector<bool> came;  // by slot: this rank has brought a gradient
};

class GradientReducer {
 public:
  explicit GradientReducer(std::size_t units) : unreduced_(units), keeps_(units) {}

  // Keeps the whole gradients of the unit's parameters, added to those that it keeps already.
  void keep(const Unit& unit, const std::vector<std::size_t>& parameters,
            std::vector<at::Tensor>& gradients);
  // True from keep() to the unit's next reduce(), alike on all ranks.
  bool keeps(const Unit& unit) const { return keeps_[unit.index]; }
  // Starts to average them, together with what is kept. Waits for the reduction before, so that at
  // most two are in flight. `outputs`: by slot, where this rank's rows of the averages will be.
  std::shared_ptr<Reduction> reduce(const Unit& unit, const std::vector<std::size_t>& parameters,
                                    std::vector<at::Tensor> gradients,
                                    std::vector<at::Tensor>& outputs);

 private:
  std::vector<std::vector<at::Tensor>> unreduced_;  // by unit and parameter
  std::vector<bool> keeps_;                         // by unit
  std::weak_ptr<Reduction> last_;                   // owned by its nodes
};

}  // namespace weft::shard
