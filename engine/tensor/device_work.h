// SPDX-License-Identifier: Apache-2.0
// Kernels and transfers that a future's value still waits for: they are enqueued and may not have
// run. A future with such work is done. Taking its value makes streams wait, never the host. Made
// by engine/tensor/cuda_devices.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Device.h>

#include <weft/base/export.h>
#include <weft/engine/tensor/each_tensor.h>

namespace weft::detail {

class DeviceWork;
using DeviceWorkRef = std::shared_ptr<const DeviceWork>;

class DeviceWork {
 public:
  DeviceWork() = default;
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;
  virtual ~DeviceWork() = default;
  // Makes the current stream of each device wait.
  virtual void wait() const = 0;
  // Runs the function with streams of libtorch's pool current, which wait for this work first.
  // Returns the work that the function enqueued on them. Exceptions of the function pass through.
  virtual DeviceWorkRef run(const std::function<void()>& function) const = 0;
  // The devices that the work is on, each once.
  virtual std::vector<c10::Device> devices() const = 0;
};

// All of the works as one; null if all are null.
WEFT_API DeviceWorkRef join(std::vector<DeviceWorkRef> works);
// Both works as one; either may be null.
WEFT_API DeviceWorkRef join(DeviceWorkRef one, DeviceWorkRef other);

// work->run(function). For null work, runs the function on the current streams and returns null.
WEFT_API DeviceWorkRef run_after(const DeviceWorkRef& work, const std::function<void()>& function);

// The tensors in a value; valid as long as the value.
template <class T>
std::vector<const at::Tensor*> tensors_in(const T& value) {
  std::vector<const at::Tensor*> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

// The work that the current streams of the tensors' devices have enqueued until now; null if no
// tensor is on a GPU.
WEFT_API DeviceWorkRef enqueued_for(const std::vector<const at::Tensor*>& tensors);
// The same for all tensors in a value.
template <class T>
DeviceWorkRef enqueued_for(const T& value) {
  return enqueued_for(tensors_in(value));
}

// Tells libtorch's allocator that the current streams use the tensors' memory from now on; it may
// have been allocated for other streams.
WEFT_API void hand_over(const std::vector<const at::Tensor*>& tensors);
// The same for all tensors in a value.
template <class T>
void hand_over(const T& value) {
  hand_over(tensors_in(value));
}
// The same for the value of an RRef, if that is a tensor or a vector of tensors. Objects are left
// alone: other threads may change them meanwhile.
template <class T>
void hand_over_referred(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::vector<at::Tensor>>)
    hand_over(value);
}

}  // namespace weft::detail
