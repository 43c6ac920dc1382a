// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include <weft/engine/group/shard_groups.h>

namespace weft::group {

namespace {

std::atomic<ShardGroupOf> current{nullptr};

}  // namespace

ShardGroupOf set_shard_groups(ShardGroupOf shard_group_of) {
  return current.exchange(shard_group_of);
}

ProcessGroup shard_group_of(const at::Tensor& parameter) {
  const ShardGroupOf find = current.load();
  return find == nullptr ? ProcessGroup() : find(parameter);
}

}  // namespace weft::group
