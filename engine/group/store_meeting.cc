// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <weft/engine/group/store_meeting.h>

namespace weft::group {

namespace {

// Adds the ranks from `begin` to `end` whose keys are not set. Asks few times if most are set.
void add_absent(StoreBootstrap& store, const std::string& base, int begin, int end,
                std::vector<int>& absent) {
  std::vector<std::string> keys;
  for (int rank = begin; rank < end; ++rank) keys.push_back(base + std::to_string(rank));
  if (keys.empty() || store.exist(keys)) return;
  if (keys.size() == 1) return absent.push_back(begin);
  const int middle = begin + (end - begin) / 2;
  add_absent(store, base, begin, middle, absent);
  add_absent(store, base, middle, end, absent);
}

}  // namespace

Meeting::Missing absent_from(const CoreOptions& group, std::string base) {
  return [store = group.own_store, base = std::move(base), size = group.size] {
    const StoreCallBounds bounds({}, kStoreAnswers);
    StoreBootstrap keys(store);
    std::vector<int> ranks;
    add_absent(keys, base, 0, size, ranks);
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
