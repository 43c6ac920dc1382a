// SPDX-License-Identifier: Apache-2.0
// The groups of Weft behind one backend: the first carries CPU tensors, and if it does not carry
// CUDA tensors too, a second one is made for them. Thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>

#include <weft/group.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

// Calls a function that makes a group and blocks until the other ranks have called it too.
template <class Function>
weft::ProcessGroup made_by(Function function) {
  // Shared, since the call goes on after Ctrl-C.
  const auto made = std::make_shared<weft::ProcessGroup>();
  interruptible([made, function]() mutable { *made = function(); });
  return *made;
}

// Makes a group of ranks of another. Blocks until all of them have called it.
weft::ProcessGroup make_subgroup(weft::ProcessGroup parent, const std::vector<int>& ranks,
                                 weft::ProcessGroupOptions wanted);

class DeviceGroups {
 public:
  // The group is empty if the ranks have not met yet.
  explicit DeviceGroups(weft::ProcessGroup group) : first_(std::move(group)) {}

  // Empty before replace() and after take().
  weft::ProcessGroup first() const;
  // The group for tensors of the device. Makes it if need be: blocks then until all ranks have
  // called it, at most for `timeout`.
  weft::ProcessGroup on(c10::Device device, std::chrono::milliseconds timeout);
  // The groups that exist, the first one first.
  std::vector<weft::ProcessGroup> all() const;
  // Takes the groups away. The caller drops them from the back: the second was made of the first.
  std::vector<weft::ProcessGroup> take();
  void replace(weft::ProcessGroup group);

 private:
  std::vector<weft::ProcessGroup> present() const;  // with the mutex held

  std::mutex making_;  // held while for_cuda_ is made
  mutable std::mutex mutex_;
  weft::ProcessGroup first_, for_cuda_;  // guarded by mutex_
};

}  // namespace weft::python
