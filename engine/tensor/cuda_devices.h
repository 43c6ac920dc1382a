// The GPUs as a job uses them, and what is enqueued on libtorch's streams there, as Fences. The
// only place that asks libtorch for a current stream. Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/fence.h>
#include <weft/engine/tensor/device_work.h>
#include <weft/transport/communicator.h>
#include <weft/transport/connection.h>

namespace weft {

namespace cuda {
struct Driver;
class Device;
}  // namespace cuda

namespace transport::staged {
class Stage;
}
namespace transport::cuda_ipc {
struct Identity;
}

namespace tensor {

class CudaDevices : public std::enable_shared_from_this<CudaDevices> {
 public:
  // Opens the driver when a GPU is first asked for.
  CudaDevices() = default;
  // `here` is what peers are told of this process; null: what it is.
  explicit CudaDevices(std::shared_ptr<const cuda::Driver> driver,
                       std::shared_ptr<const transport::cuda_ipc::Identity> here = nullptr)
      : driver_(std::move(driver)), here_(std::move(here)) {}

  // Whether this build has CUDA. Then lane_over() works without a GPU as well: it understands lanes
  // of a peer that has one.
  static bool built();
  // How many GPUs there are; 0 in a build or on a machine without.
  int count();
  // One GPU, opened at its first use. Throws Unsupported on a machine without, or in a build
  // without CUDA.
  std::shared_ptr<cuda::Device> open(int index);

  // Passes when everything that is enqueued on the device's current stream now has run. Empty for
  // the CPU.
  Fence ready(const c10::Device& device);
  Fence recorded(const c10::Stream& stream);
  // When all of the streams have come so far, which are of one device or several; empty for none.
  Fence recorded(const std::vector<c10::Stream>& streams);
  // Throws Caller where the device's current stream is being captured into a CUDA graph, which
  // cannot hold `what`; and why.
  void refuse_capture(const c10::Device& device, std::string_view what, std::string_view why);
  // Whether it was recorded on a stream that was being captured: for the host it passes when the
  // capture ends.
  static bool is_captured(const Fence& fence);
  // The stream waits, the host goes on.
  void wait(const Fence& fence, const c10::Stream& stream);
  static c10::Stream current_stream(const c10::Device& device);

  // What a Future holds whose value is there when the fences, on this device, have passed.
  detail::DeviceWorkRef work(const c10::Device& device, std::vector<Fence> fences);
  // And of a value that these streams have enqueued until now, one of each device; null for none.
  // Whoever takes it uses the storages, which were allocated for those streams, on the current ones
  // from then on. What then() calls has these streams current.
  detail::DeviceWorkRef work(const std::vector<c10::Stream>& streams,
                             std::vector<c10::Storage> storages = {});

  // For each of the GPUs: a stream of libtorch's pool, or the one that is current on this thread.
  static std::vector<c10::Stream> pool_streams(const std::vector<int>& gpus);
  static std::vector<c10::Stream> current_streams(const std::vector<int>& gpus);
  // Memory of libtorch's allocator, not cleared, for what is enqueued on the stream. May block as
  // that does, and breaks no capture of another thread; throws c10::Error where there is none.
  c10::Storage allocate(std::size_t bytes, const c10::Stream& stream);

  // What lanes for memory of these GPUs share; before the first of them, once. Blocks for a moment;
  // throws Busy, Device, Unsupported.
  void prepare_lanes(const std::vector<int>& gpus);
  // A lane for device memory over one for host memory: through pinned memory
  // (transport/staged_connection.h), and over shm by letting the peer's GPU read it where it is,
  // for what can be read so (transport/cuda_ipc). Both ends are made so. Throws Busy, Device.
  std::shared_ptr<transport::Connection> lane_over(std::shared_ptr<transport::Connection> below,
                                                   const std::shared_ptr<EventLoop>& loop);

  // A communicator for tensors on the GPU over one for host memory; see transport/staged.h.
  std::shared_ptr<transport::Communicator> stage_over(std::shared_ptr<transport::Communicator> host,
                                                      int index,
                                                      const std::shared_ptr<EventLoop>& loop);

  // There are no lanes any more: what they shared is retired.
  void end_lanes() { stage_.reset(); }

  // Frees what the data path has retired meanwhile. Blocks until the devices have done with it, or
  // the deadline comes.
  void reclaim(Deadline deadline);

 private:
  std::mutex mutex_;
  std::shared_ptr<const cuda::Driver> driver_;
  std::shared_ptr<const transport::cuda_ipc::Identity> here_;
  std::map<int, std::shared_ptr<cuda::Device>> devices_;
  std::shared_ptr<transport::staged::Stage> stage_;  // does not change once there are lanes
};

}  // namespace tensor
}  // namespace weft
