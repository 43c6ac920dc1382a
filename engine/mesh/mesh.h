// SPDX-License-Identifier: Apache-2.0
// Mesh: the ranks of a group as a grid with named axes, and a group along each axis. Semantics of
// torch.distributed.device_mesh; differences are in docs/differences-from-pytorch.md.
//
//   weft::Mesh mesh(group, {{"replicate", 2}, {"shard", -1}});  // 8 ranks: 2 rows of 4
//   mesh["shard"].all_reduce(tensor).wait();                    // among the 4 ranks of this row
//
// Ranks are numbered row by row: those next to each other differ in the last axis. weft-run numbers
// the ranks of a host one after the other, so the last axis stays within hosts; the axis that
// communicates most belongs there. If ranks are numbered otherwise, rank 0 warns.
//
// Errors, the flight recorder, the timeline and the metrics name a rank of a mesh's group by its
// place: "shard[3] of replicate[0]" is the rank with coordinate 3 in the group along shard whose
// ranks have coordinate 0 along replicate.
//
// Any thread may use a Mesh. The constructor and the first flatten() of some axes are collective
// and block until the ranks have come, at most for the group's timeout; nothing else blocks, except
// that the last copy leaves the groups.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// One axis of a Mesh.
struct MeshAxis {
  // The axis's name. It is not empty, and has no control characters and none of / [ ] , ' and ".
  std::string name;
  // How many ranks differ along it; -1, for at most one axis of a mesh: as many as are left.
  int ranks = -1;
};

// A grid of ranks. Copies, and the meshes that slice() returns, share its groups.
class WEFT_API Mesh {
 public:
  // Collective; all ranks pass the same axes. Makes a group along each axis, apart from `group`, so
  // that operations of one do not wait for those of another. Throws Caller, on all ranks, if axes
  // are wrong or differ between ranks: names are unique, and the axes' ranks multiplied are
  // group.size().
  Mesh(ProcessGroup group, std::vector<MeshAxis> axes);

  // The ranks that differ from this one along the axis only, by their coordinates there. Throws
  // Caller, naming the axes, for another name.
  ProcessGroup operator[](const std::string& axis) const;
  // The number of ranks along the axis. Throws as operator[].
  int size(const std::string& axis) const;
  // This rank's place along the axis, from 0. Throws as operator[].
  int coordinate(const std::string& axis) const;
  // The axes, in order, with their numbers of ranks (none is -1).
  std::vector<MeshAxis> axes() const;
  // The part of the mesh that has these axes: the ranks that differ from this one along them only.
  // Throws Caller for no, unknown or repeated axes, and for axes in another order than the mesh's.
  Mesh slice(std::vector<std::string> axes) const;
  // All ranks of the part that slice(axes) has, as one group, numbered row by row. Collective among
  // them at its first use for these axes; afterwards it returns the same group, also in copies and
  // slices. For one axis: operator[]; for all axes: the group of the constructor. Throws as
  // slice().
  ProcessGroup flatten(std::vector<std::string> axes) const;
  // All ranks of this mesh: the group of the constructor; of a slice: flatten() of its axes.
  ProcessGroup group() const;

 private:
  struct Whole;  // what a mesh, its copies and its slices share
  Mesh(std::shared_ptr<Whole> whole, std::vector<std::size_t> axes);
  Whole& whole() const;  // throws Caller if this mesh has been moved from
  std::size_t find(const std::string& axis) const;
  std::vector<std::size_t> find_all(const std::vector<std::string>& names, const char* call) const;

  std::shared_ptr<Whole> whole_;
  std::vector<std::size_t> axes_;  // of the whole, those of this mesh
};

}  // namespace weft
