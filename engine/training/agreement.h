// SPDX-License-Identifier: Apache-2.0
// The groups whose ranks have to agree about a set of parameters. Internal.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/access.h>
#include <weft/engine/group/process_group.h>

namespace weft::training {

// Adds the group unless it is empty, has one rank or is among them.
inline void add_group(std::vector<ProcessGroup>& groups, const ProcessGroup& group) {
  if (!group || group.size() == 1) return;
  for (const ProcessGroup& known : groups) {
    if (group::are_same(known, group)) return;
  }
  groups.push_back(group);
}

// Reduces a copy of a small tensor over the group, on a device that the group carries. Returns it
// on the tensor's device; the host does not wait for a GPU.
inline at::Tensor reduced(const at::Tensor& tensor, ReduceOp op, const ProcessGroup& group) {
  const c10::Device device = tensor.is_cpu() ? group::host_values_device(group) : group.device();
  at::Tensor carried =
      tensor.to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  group::all_reduce(group, carried, op).wait();
  return carried.to(tensor.device());
}

}  // namespace weft::training
