// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include <weft/engine/ddp/device_groups.h>

namespace weft::parallel {

std::vector<c10::Device> gpus_of(const ProcessGroup& group,
                                 const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> gpus;
  if (group.device().is_cuda()) gpus.push_back(group.device());
  bool any = false;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cuda()) continue;
    any = true;
    if (std::find(gpus.begin(), gpus.end(), tensor.device()) == gpus.end())
      gpus.push_back(tensor.device());
  }
  if (!any) gpus.clear();
  return gpus;
}

DeviceGroups::DeviceGroups(ProcessGroup group, const std::vector<at::Tensor>& tensors)
    : own_(std::move(group)) {
  const std::vector<c10::Device> gpus = gpus_of(own_, tensors);
  std::vector<int> ranks(static_cast<std::size_t>(own_.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (std::size_t i = 1; i < gpus.size(); ++i) {
    further_.emplace(gpus[i].index(), own_.new_group(ranks, {.device = gpus[i]}));
  }
}

ProcessGroup& DeviceGroups::of(const c10::Device& device) {
  const auto found = device.is_cuda() ? further_.find(device.index()) : further_.end();
  return found == further_.end() ? own_ : found->second;
}

}  // namespace weft::parallel
