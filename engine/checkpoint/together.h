// SPDX-License-Identifier: Apache-2.0
// Collectives of checkpoints. Internal.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/process_group.h>

namespace weft::checkpoint {

// Runs a collective that a user easily calls on rank 0 alone: an error that the absence of other
// ranks causes says that all must call it.
template <class Call>
auto on_all(const char* name, const ProcessGroup& group, const Call& call) {
  const group::CalledBy by(name);
  try {
    return call();
  } catch (const Error& error) {
    const auto has_left = [&](int rank) { return group::has_left(group, rank); };
    const bool is_left_alone =
        error.blame() == Blame::PeerLost && std::ranges::any_of(error.ranks(), has_left);
    if (error.blame() != Blame::Timeout && !is_left_alone) throw;
    throw error.with_text(error.text() + "; all ranks of the group must call " + name +
                          ", also those that do not touch the file");
  }
}

// Collective; called after group::agree(). Throws the same error on all ranks unless they name the
// same parts. `values`: further lines, of the values that they divide among them.
void compare_names(ProcessGroup& group, const std::vector<std::string>& names,
                   const std::vector<std::string>& values = {});

}  // namespace weft::checkpoint
