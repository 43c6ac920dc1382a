// SPDX-License-Identifier: Apache-2.0
// The sum of sparse COO tensors over the ranks of a group: the concatenation of their entries,
// coalesced. Ranks first exchange their numbers of entries, since the others must make room for
// them. Internal to all_reduce and to DistributedDataParallel, which does other work between the
// two halves.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::group {

class SparseSum {
 public:
  SparseSum() = default;
  // Called by every rank, with tensors of one shape, dtype and number of sparse dimensions; entries
  // may differ. Announces this rank's number of entries and does not wait.
  SparseSum(ProcessGroup group, const at::Tensor& own);

  // Called once, by every rank at the same place among the group's operations. Exchanges the
  // entries; the host waits until it knows how many there are. Returns the coalesced sum, bitwise
  // the same on all ranks. Throws Caller, on all ranks and naming one that differs, if shape, dtype
  // or dimensions differ.
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
