// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/group/store_meeting.h>

namespace weft::group {

Meeting::Missing absent_from(const CoreOptions& group, std::string base) {
  return [store = group.own_store, base = std::move(base), size = group.size] {
    StoreBootstrap keys(store);
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) {
      if (!keys.exists(base + std::to_string(rank))) ranks.push_back(rank);
    }
    return ranks;
  };
}

StoreMeeting::StoreMeeting(const CoreOptions& options, StoreBootstrap& group_store,
                           const Ledger& ledger, Failure& failure, const std::string& base,
                           std::string what)
    : wait_(options.job->waits, options.name, std::move(what), options.rank, kAllCall,
            absent_from(options, base)),
      store_(options.own_store, [this, &group_store, &ledger, &failure, base] {
        failure.throw_if_broken();
        ledger.throw_if_left_without(
            [&](int rank) { return group_store.exists(base + std::to_string(rank)); });
        wait_.look();
      }) {}

}  // namespace weft::group
