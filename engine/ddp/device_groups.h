// SPDX-License-Identifier: Apache-2.0
// Chooses the group that carries a model's tensor. A group's communicator carries tensors of one
// GPU. For a model on several GPUs there is one more group, of the same ranks, for each further
// GPU, so that the buckets of all GPUs travel at the same time.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <weft/engine/group/process_group.h>

namespace weft::parallel {

// The GPUs that the tensors lie on: the group's own first, then the others in the order of their
// first tensors. Ranks with equal models get equally many, even if their GPUs have other indices.
// Empty if no tensor is on a GPU.
std::vector<c10::Device> gpus_of(const ProcessGroup& group, const std::vector<at::Tensor>& tensors);

class DeviceGroups {
 public:
  DeviceGroups() = default;
  // Collective if there are further GPUs: blocks until all ranks have called it. The tensors lie in
  // the same way on every rank.
  DeviceGroups(ProcessGroup group, const std::vector<at::Tensor>& tensors);

  // The group that was given, for the host and its own GPU.
  ProcessGroup& own() { return own_; }
  const ProcessGroup& own() const { return own_; }
  // The group for that device's tensors.
  ProcessGroup& of(const c10::Device& device);

 private:
  ProcessGroup own_;
  std::map<c10::DeviceIndex, ProcessGroup> further_;
};

}  // namespace weft::parallel
