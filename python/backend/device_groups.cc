// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>

#include <weft/python/backend/device_groups.h>

namespace weft::python {

weft::ProcessGroup make_subgroup(weft::ProcessGroup parent, const std::vector<int>& ranks,
                                 weft::ProcessGroupOptions wanted) {
  // new_group takes the default for a timeout that is not given, and uses the parent's, which may
  // be shorter. PyTorch's default is the same 30 minutes, and a program may ask for them.
  if (wanted.timeout == weft::ProcessGroupOptions().timeout)
    wanted.timeout += std::chrono::milliseconds(1);
  return made_by([parent, ranks, wanted]() mutable { return parent.new_group(ranks, wanted); });
}

weft::ProcessGroup DeviceGroups::first() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

weft::ProcessGroup DeviceGroups::on(c10::Device device, std::chrono::milliseconds timeout) {
  weft::ProcessGroup group = first();
  if (!group || !device.is_cuda() || group.device().is_cuda()) return group;
  const std::lock_guard one_makes_it(making_);
  {
    const std::lock_guard lock(mutex_);
    if (!first_ || for_cuda_) return for_cuda_;
  }
  std::vector<int> everyone(static_cast<std::size_t>(group.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  weft::ProcessGroup made =
      make_subgroup(group, everyone, {.backend = "weft", .timeout = timeout, .device = device});
  const std::lock_guard lock(mutex_);
  if (first_) for_cuda_ = made;  // take() has not been called meanwhile
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
