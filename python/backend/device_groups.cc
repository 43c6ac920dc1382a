// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>

#include <weft/python/backend/device_groups.h>

namespace weft::python {

weft::ProcessGroup DeviceGroups::first() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

weft::ProcessGroup DeviceGroups::on(c10::Device device, std::chrono::milliseconds timeout) {
  weft::ProcessGroup group = first();
  if (!group || !device.is_cuda() || group.device().is_cuda()) return group;
  const std::lock_guard lock(mutex_);
  if (!for_cuda_) {
    std::vector<int> everyone(static_cast<std::size_t>(group.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    for_cuda_ =
        group.new_group(everyone, {.backend = "weft", .timeout = timeout, .device = device});
  }
  return for_cuda_;
}

std::vector<weft::ProcessGroup> DeviceGroups::present() const {
  std::vector<weft::ProcessGroup> groups;
  if (first_) groups.push_back(first_);
  if (for_cuda_) groups.push_back(for_cuda_);
  return groups;
}

std::vector<weft::ProcessGroup> DeviceGroups::all() const {
  const std::lock_guard lock(mutex_);
  return present();
}

std::vector<weft::ProcessGroup> DeviceGroups::take() {
  const std::lock_guard lock(mutex_);
  std::vector<weft::ProcessGroup> taken = present();
  first_ = for_cuda_ = {};
  return taken;
}

void DeviceGroups::replace(weft::ProcessGroup group) {
  const std::lock_guard lock(mutex_);
  first_ = std::move(group);
}

}  // namespace weft::python
