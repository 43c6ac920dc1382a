// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a mesh: its axes, the coordinates of ranks, the ranks of a part, the names of
// parts. Pure; any thread may use it. Internal.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <weft/engine/mesh/mesh.h>

namespace weft::mesh {

// Indices of axes, ascending.
using Indices = std::vector<std::size_t>;

// "replicate (2), shard (4)".
std::string text_of(const std::vector<MeshAxis>& axes);

class Layout {
 public:
  // The axes for a group of that many ranks. Replaces -1 by what is left. Throws Caller, saying
  // which sizes would fit.
  Layout(std::vector<MeshAxis> axes, int ranks);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int coordinate(int rank, std::size_t axis) const;
  // The ranks that differ from `rank` along these axes only, row by row.
  std::vector<int> part(int rank, const Indices& axes) const;
  // The name of that part: "shard of replicate[0]", the same for all its ranks.
  std::string name(int rank, const Indices& axes) const;
  // The rank's place in it: "shard[3] of replicate[0]".
  std::string place(int rank, const Indices& axes) const;

 private:
  std::string others(int rank, const Indices& axes) const;  // " of replicate[0]"; "" for all axes

  std::vector<MeshAxis> axes_;
};

// Returns the warning for ranks that are numbered so that the last axis (with more than one rank)
// crosses hosts, though ranks of one host follow each other in another numbering; nullopt if they
// are numbered host by host, or no part along that axis crosses hosts. `hosts`: the host of each
// rank.
std::optional<std::string> crossing_hosts(const Layout& layout,
                                          const std::vector<std::string>& hosts);

}  // namespace weft::mesh
