// SPDX-License-Identifier: Apache-2.0
// For tests that watch or disturb the keys by which ranks meet.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <weft/engine/group/core.h>

namespace weft::harness {

// Lets the ranks of the group meet in `store` instead of the one that its first rank keeps. Each
// rank calls it right after the group is made.
inline void meet_in(const ProcessGroup& group, c10::intrusive_ptr<c10d::Store> store) {
  weft::group::Core& core = weft::group::Core::of(group);
  core.options.own_store = store;
  core.bootstrap->move_to(std::move(store));
}

// The store in which the members of a group will meet that `group` makes: "default/0-2", of ranks
// of the job.
inline weft::group::StoreBootstrap store_of_later(const ProcessGroup& group,
                                                  const std::string& name, std::vector<int> ranks) {
  weft::group::CoreOptions made = weft::group::Core::of(group).options;
  made.name = name;
  made.size = static_cast<int>(ranks.size());
  made.global_ranks = std::move(ranks);
  return weft::group::StoreBootstrap(weft::group::kept_by_members(made));
}

}  // namespace weft::harness
