// What a future's value still waits for on devices: kernels and transfers that are enqueued and may
// not have run. A future with such work is done; who takes the value makes streams wait, never the
// host. Made by engine/tensor/cuda_devices.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

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
  // The current stream of each device waits.
  virtual void wait() const = 0;
  // Runs the function with streams of libtorch's pool current, which have waited; gives what it
  // enqueued on them. What it throws passes through.
  virtual DeviceWorkRef run(const std::function<void()>& function) const = 0;
};

// Both of them; either may be null.
WEFT_API DeviceWorkRef join(DeviceWorkRef one, DeviceWorkRef other);

// The function, run as `work` says; null work runs it as it is and gives null.
WEFT_API DeviceWorkRef run_after(const DeviceWorkRef& work, const std::function<void()>& function);

// The tensors in a value; valid as long as that is.
template <class T>
std::vector<const at::Tensor*> tensors_in(const T& value) {
  std::vector<const at::Tensor*> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

// What the current streams of the tensors' devices have enqueued until now; null where none lies on
// a GPU.
WEFT_API DeviceWorkRef enqueued_for(const std::vector<const at::Tensor*>& tensors);
// The same for all tensors in a value.
template <class T>
DeviceWorkRef enqueued_for(const T& value) {
  return enqueued_for(tensors_in(value));
}

// Tensors go to whoever asked for them: their memory is used on the current streams from now on,
// which need not be those that libtorch's allocator gave it to.
WEFT_API void hand_over(const std::vector<const at::Tensor*>& tensors);
// The same for all tensors in a value.
template <class T>
void hand_over(const T& value) {
  hand_over(tensors_in(value));
}
// The same for what an RRef refers to; not inside of objects, which others may change meanwhile.
template <class T>
void hand_over_referred(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::vector<at::Tensor>>)
    hand_over(value);
}

}  // namespace weft::detail
