// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include <weft/engine/group/shard_groups.h>

namespace weft::group {

namespace {

std::atomic<GroupOfParameter> shards_of{nullptr}, replicas_of{nullptr};

ProcessGroup found_by(GroupOfParameter find, const at::Tensor& parameter) {
  return find == nullptr ? ProcessGroup() : find(parameter);
}

}  // namespace

void set_shard_groups(GroupOfParameter shards, GroupOfParameter replicas) {
  shards_of = shards;
  replicas_of = replicas;
}

ProcessGroup shard_group_of(const at::Tensor& parameter) {
  return found_by(shards_of.load(), parameter);
}

ProcessGroup replica_group_of(const at::Tensor& parameter) {
  return found_by(replicas_of.load(), parameter);
}

}  // namespace weft::group
