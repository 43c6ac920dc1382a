// SPDX-License-Identifier: Apache-2.0
// The GPUs as a job uses them, and Fences for the work that is enqueued on libtorch's streams
// there. No other file asks libtorch for a current stream. Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/fence.h>
#include <weft/base/mutex.h>
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
  // `here` is the identity that peers are told of this process; null: the real one.
  explicit CudaDevices(std::shared_ptr<const cuda::Driver> driver,
                       std::shared_ptr<const transport::cuda_ipc::Identity> here = nullptr)
      : driver_(std::move(driver)), here_(std::move(here)) {}

  // True if this build has CUDA. connection_over() then works without a GPU too: it understands
  // connections of a peer that has one.
  static bool built();
  // Number of GPUs; 0 on a machine without GPUs or in a build without CUDA.
  int count();
  // Returns one GPU, opened at its first use. Throws Unsupported on a machine without GPUs or in a
  // build without CUDA.
  std::shared_ptr<cuda::Device> open(int index);

  // A fence that passes when everything that is enqueued now on the device's current stream has
  // run. Empty for the CPU.
  Fence ready(const c10::Device& device);
  Fence recorded(const c10::Stream& stream);
  // A fence that passes when all of the streams have run what is enqueued on them now. The streams
  // may be of one device or of several; empty for no streams.
  Fence recorded(const std::vector<c10::Stream>& streams);
  // Throws Caller if the device's current stream is being captured into a CUDA graph. `what` names
  // the operation that cannot be captured, `why` the reason.
  void refuse_capture(const c10::Device& device, std::string_view what, std::string_view why);
  // True if the fence was recorded on a stream that was being captured. On the host such a fence
  // passes when the capture ends.
  static bool is_captured(const Fence& fence);
  // Makes the stream wait; the host goes on.
  void wait(const Fence& fence, const c10::Stream& stream);
  static c10::Stream current_stream(const c10::Device& device);

  // Work for a Future whose value is ready when the fences, on this device, have passed.
  detail::DeviceWorkRef work(const c10::Device& device, std::vector<Fence> fences);
  // Work for a Future whose value these streams, one of each device, have enqueued until now; null
  // for no streams. The storages were allocated for those streams; when the value is taken, they
  // are recorded on the current streams, which use them from then on. then() runs its function with
  // these streams current.
  detail::DeviceWorkRef work(const std::vector<c10::Stream>& streams,
                             std::vector<c10::Storage> storages = {});

  // For each of the GPUs: a stream of libtorch's pool; the stream that is current on this thread.
  static std::vector<c10::Stream> pool_streams(const std::vector<int>& gpus);
  static std::vector<c10::Stream> current_streams(const std::vector<int>& gpus);
  // Memory of libtorch's allocator, not cleared, for work on `stream`. May block as that allocator
  // does. Does not break another thread's capture. Throws c10::Error when memory is exhausted.
  c10::Storage allocate(std::size_t bytes, const c10::Stream& stream);

  // Prepares the state that connections for memory of these GPUs share. Call it once, before the
  // first connection. Blocks for a moment; throws Busy, Device, Unsupported.
  void prepare_connections(const std::vector<int>& gpus);
  // Makes a connection for device memory over one for host memory. Bytes go through pinned memory
  // (transport/staged/staged_connection.h); over shm the peer's GPU reads memory in place where it
  // can (transport/cuda_ipc). Both ends must be made this way. Throws Busy, Device.
  std::shared_ptr<transport::Connection> connection_over(
      std::shared_ptr<transport::Connection> below, const std::shared_ptr<EventLoop>& loop);

  // A communicator for tensors on the GPU over one for host memory; see
  // transport/staged/staged_communicator.h.
  std::shared_ptr<transport::Communicator> stage_over(std::shared_ptr<transport::Communicator> host,
                                                      int index,
                                                      const std::shared_ptr<EventLoop>& loop);

  // Retires the state that connections shared. Call it when no connection is left.
  void end_connections() { stage_.reset(); }

  // Frees memory that the data path has retired. Blocks until the devices no longer use it, or
  // until the deadline.
  void reclaim(Deadline deadline);

 private:
  Mutex mutex_;
  std::shared_ptr<const cuda::Driver> driver_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<const transport::cuda_ipc::Identity> here_;
  std::map<int, std::shared_ptr<cuda::Device>> devices_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<transport::staged::Stage> stage_;  // constant while there are connections
};

}  // namespace tensor
}  // namespace weft
