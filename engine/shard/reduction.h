// SPDX-License-Identifier: Apache-2.0
// An average of a unit's gradients that is under way: a reduce-scatter over the ranks that have the
// other rows, and then, over a mesh of two axes, an all-reduce of this rank's rows over the ranks
// that have the same ones.
//
// Thread-safe, except that one thread at a time waits for a reduction. What waits blocks the host
// (CPU) or makes the current stream wait (CUDA).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/mutex.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/work.h>
#include <weft/engine/shard/loan.h>
#include <weft/engine/shard/offload.h>

namespace weft::shard {

class ReductionOrder;

// One pair of operations, or several if the gradients differ in dtype.
struct Reduction {
  struct Bucket {
    at::ScalarType dtype = at::kFloat;
    std::vector<std::size_t> slots;  // positions in `parameters` of GradientReducer::reduce()
    at::Tensor output;               // this rank's rows, then for each slot how many ranks used it
    // The tensor that the graph passes on. If shards are in host memory, it has no memory any more.
    at::Tensor shown = {};
    Work work;                               // the last operation that has been started
    at::ScalarType kept_as = at::kFloat;     // the shards' dtype, if they have one
    Loan lent = {};                          // to `work`
    std::shared_ptr<HostCopy> on_host = {};  // of `output`, for shards in host memory
  };
  // Waits for the result. Throws the operation's error.
  void wait();
  // Blocks until gradients in host memory have come. Throws the operation's error.
  void wait_for_host();
  // This rank's rows of the averages, by slot; undefined where no rank has brought a gradient.
  // Call it after wait().
  void finish(std::vector<at::Tensor>& gradients, const std::vector<at::ScalarType>& dtypes) const;

  std::vector<Bucket> buckets;
  std::vector<bool> came;      // by slot: this rank has brought a gradient
  std::uint32_t unit = 0;      // its number
  const char* called_by = "";  // Unit::called_by
  std::shared_ptr<ReductionOrder> order;
  std::shared_ptr<Offload> offload;  // null if the shards are on the unit's device
  bool has_advanced = false;         // for the order's use
};

// Reductions begin in the same order on all ranks, but which one a rank waits for first may differ.
// So the all-reduces of all models that average over the same ranks start in the order in which
// their reductions began: each when the next reduction begins, and the last one when a rank first
// waits for a reduction.
class ReductionOrder {
 public:
  // Returns the group's order in this process; for an empty group a new one without all-reduces.
  static std::shared_ptr<ReductionOrder> over(const ProcessGroup& replicas);

  // The reduction has begun. Waits for the reduce-scatters of those before, so that at most two are
  // in flight.
  void add(const std::shared_ptr<Reduction>& reduction);
  // Waits for the reduction's reduce-scatter, and starts its all-reduce.
  void advance(Reduction& reduction);
  // Drops what a failed backward has begun.
  void forget();

 private:
  explicit ReductionOrder(ProcessGroup replicas) : replicas_(std::move(replicas)) {}
  void advance_begun() WEFT_REQUIRES(mutex_);
  void advance_one(Reduction& reduction) WEFT_REQUIRES(mutex_);

  const ProcessGroup replicas_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Reduction>> begun_ WEFT_GUARDED_BY(mutex_);  // and not advanced
};

}  // namespace weft::shard
