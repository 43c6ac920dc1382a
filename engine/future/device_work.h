// What a future's value still waits for on devices: kernels and transfers that are enqueued and may not have run. A future
// with such work is done; who takes the value makes streams wait, never the host. Made by engine/tensor/cuda_devices.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace at {
class Tensor;
}

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
  // Runs the function with streams of libtorch's pool current, which have waited; gives what it enqueued on them. What it
  // throws passes through.
  virtual DeviceWorkRef run(const std::function<void()>& function) const = 0;
};

// Both of them; either may be null.
DeviceWorkRef join(DeviceWorkRef one, DeviceWorkRef other);

// The function, run as `work` says; null work runs it as it is and gives null.
DeviceWorkRef run_after(const DeviceWorkRef& work, const std::function<void()>& function);

// A value goes to whoever asked for it: its memory is used on the current stream from now on, which need not be the stream
// that libtorch's allocator gave it to.
template <class T>
void hand_over(const T&) {}
void hand_over(const at::Tensor& tensor);
void hand_over(const std::vector<at::Tensor>& tensors);

}  // namespace weft::detail
