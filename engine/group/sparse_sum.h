// The sum of sparse COO tensors over the ranks of a group: the concatenation of their entries,
// coalesced. How many entries each rank has is exchanged first, because the others must make room
// for them. Internal to all_reduce and to DistributedDataParallel, which does other work between
// the two halves.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::group {

class SparseSum {
 public:
  SparseSum() = default;
  // Every rank, with tensors of one shape, dtype and number of sparse dimensions; entries may
  // differ. Tells the others how many this rank has, and waits for nobody.
  SparseSum(ProcessGroup group, const at::Tensor& own);

  // Once, by every rank at the same place among the group's operations. Exchanges the entries; the
  // host waits until it knows how many there are. Returns the coalesced sum, the same bits on all
  // ranks. Throws Caller, on all ranks and naming one that differs, where shape, dtype or
  // dimensions do.
  at::Tensor finish();

 private:
  void check_announced(const at::Tensor& all) const;
  at::Tensor gathered(const at::Tensor& mine, const at::Tensor& entries);

  ProcessGroup group_;
  at::Tensor own_;        // coalesced
  at::Tensor announced_;  // [ranks, kWords] int64, on own_'s device
  Work announcing_;
};

}  // namespace weft::group
