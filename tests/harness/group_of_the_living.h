// SPDX-License-Identifier: Apache-2.0
// Makes a group of the ranks that live, although more of them may be lost meanwhile.
#pragma once

#include <utility>

#include <weft/group.h>

namespace weft::harness {

// As in docs/data-parallel.md.
inline ProcessGroup group_of_the_living(ProcessGroup& group) {
  for (auto living = group.living_ranks();;) {
    try {
      return group.new_group(living);
    } catch (const Error& error) {
      const auto before = std::exchange(living, group.living_ranks());
      if (error.blame() != Blame::PeerLost || living == before) throw;
    }
  }
}

}  // namespace weft::harness
