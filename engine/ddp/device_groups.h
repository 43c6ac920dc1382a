// Which group carries a model's tensors. A group's communicator takes those of one GPU; a model
// that lies on several has a group of the same ranks for each further one, so that its buckets
// travel on all of them at once.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <weft/engine/group/process_group.h>

namespace weft::parallel {

// The GPUs that the tensors lie on, the group's own first, then in the order of their first
// tensors: the same number on ranks whose models are alike, whatever the GPUs are called there.
// Empty where there are none.
std::vector<c10::Device> gpus_of(const ProcessGroup& group, const std::vector<at::Tensor>& tensors);

class DeviceGroups {
 public:
  DeviceGroups() = default;
  // Collective where there are further GPUs; blocks until all ranks have come. Every rank gives
  // tensors that lie alike.
  DeviceGroups(ProcessGroup group, const std::vector<at::Tensor>& tensors);

  // The group that was given, which has the host and its own GPU.
  ProcessGroup& own() { return own_; }
  const ProcessGroup& own() const { return own_; }
  ProcessGroup& of(const c10::Device& device);

 private:
  ProcessGroup own_;
  std::map<c10::DeviceIndex, ProcessGroup> further_;
};

}  // namespace weft::parallel
