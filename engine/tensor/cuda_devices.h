// The GPUs as a job uses them, and what is enqueued on libtorch's streams there, as Fences. The only place that asks
// libtorch for a current stream. Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/fence.h>
#include <weft/engine/future/device_work.h>
#include <weft/transport/communicator.h>

namespace weft {

namespace cuda {
struct Driver;
class Device;
}  // namespace cuda

namespace tensor {

class CudaDevices : public std::enable_shared_from_this<CudaDevices> {
 public:
  // Opens the driver when a GPU is first asked for.
  CudaDevices() = default;
  explicit CudaDevices(std::shared_ptr<const cuda::Driver> driver) : driver_(std::move(driver)) {}

  // One GPU, opened at its first use. Throws Unsupported on a machine without, or in a build without CUDA.
  std::shared_ptr<cuda::Device> open(int index);

  // Passes when everything that is enqueued on the device's current stream now has run. Empty for the CPU.
  Fence ready(const c10::Device& device);
  Fence recorded(const c10::Stream& stream);
  // The stream waits, the host goes on.
  void wait(const Fence& fence, const c10::Stream& stream);
  static c10::Stream current_stream(const c10::Device& device);

  // What a Future holds whose value is there when the fences, on this device, have passed.
  detail::DeviceWorkRef work(const c10::Device& device, std::vector<Fence> fences);

  // A communicator for tensors on the GPU over one for host memory; see transport/staged.h.
  std::shared_ptr<transport::Communicator> stage_over(std::shared_ptr<transport::Communicator> host, int index,
                                                      const std::shared_ptr<EventLoop>& loop);

  // Frees what the data path has retired meanwhile. Blocks until the devices have done with it, or the deadline comes.
  void reclaim(Deadline deadline);

 private:
  std::mutex mutex_;
  std::shared_ptr<const cuda::Driver> driver_;
  std::map<int, std::shared_ptr<cuda::Device>> devices_;
};

}  // namespace tensor
}  // namespace weft
