// One GPU as this process uses it: its primary context (the one that libtorch and NCCL use as
// well), what it can do, and what every piece of work on it shares: the pool of events and the
// retirement.
//
// Shared by shared_ptr, because fences, pinned blocks and device memory outlive whoever made them.
// Usable from every thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <weft/base/error.h>
#include <weft/base/slice.h>
#include <weft/cuda/driver.h>

namespace weft::cuda {

class EventPool;
class Retirement;
class Spans;

class Device : public std::enable_shared_from_this<Device> {
  struct Key {};  // only open() makes one

 public:
  // What a network card writes into the GPU's memory (GPUDirect RDMA): whether the GPU sees it in
  // order, once somebody has flushed it (rdma.h), or not reliably, where the memory must not be
  // written so.
  enum class RemoteWrites { Ordered, Flushed, Unseen };
  // Read once. The 32-bit stream memory operations need no attribute: every driver that has the
  // functions has them.
  struct Properties {
    std::string name;
    int compute_capability = 0;  // 90 for 9.0
    int multiprocessors = 0;
    bool mem_ops_64_bit = false;       // cuStreamWaitValue64 and its kin
    bool flush_remote_writes = false;  // a wait may flush what a NIC wrote
    bool rdma = false;                 // a NIC may read and write the memory
    bool dma_buf = false;              // memory can be exported to a NIC
    RemoteWrites remote_writes = RemoteWrites::Unseen;
    bool virtual_memory = false;  // cuMemCreate and its kin
    bool memory_pools = false;    // stream-ordered allocation
    int least_priority = 0;       // of streams; lower numbers run first
    int greatest_priority = 0;
  };

  // How many GPUs this process sees.
  static int count(const Driver& driver);
  // Retains the primary context, which the first user of a GPU creates (that takes tenths of a
  // second). Throws Caller for an index that is not there.
  static std::shared_ptr<Device> open(std::shared_ptr<const Driver> driver, int index);
  Device(Key, std::shared_ptr<const Driver> driver, int index);
  // What was retired and never reclaimed is left to the end of the context.
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return *driver_; }
  int index() const { return index_; }
  CUcontext context() const { return context_; }
  const Properties& properties() const { return properties_; }
  // How a Slice names this GPU.
  weft::Device id() const { return weft::Device::cuda(index_); }

  EventPool& events() { return *events_; }
  Retirement& retirement() { return *retirement_; }
  Spans& spans() { return *spans_; }

  // Throws what cuda::error_of makes of a failed call, with the device in its text. Remembers an
  // error that ends the context.
  void check(CUresult result, std::string_view what, Place place = Place::current()) {
    if (result != CUDA_SUCCESS) fail(result, what, place);
  }

  // Set once a call said that the context has ended: nothing enqueued on this device will ever run,
  // and every fence on it counts as passed. Who finishes an Op whose fence lies here asks for it
  // first.
  std::optional<Error> lost() const;
  bool is_lost() const noexcept { return lost_.load(std::memory_order_acquire) != CUDA_SUCCESS; }
  // Says so; the first cause stays. For those who see an error and must not throw.
  void lose(CUresult cause) noexcept;
  // Asks the driver whether the context still lives (about a microsecond); false if it has ended.
  bool probe() noexcept;

 private:
  [[noreturn]] void fail(CUresult result, std::string_view what, Place place);
  int attribute(CUdevice_attribute which, const char* what) const;
  void read_properties();

  std::shared_ptr<const Driver> driver_;
  int index_;
  CUdevice native_ = 0;
  CUcontext context_ = nullptr;
  Properties properties_;
  CUevent never_recorded_ = nullptr;  // asking for it fails only if the context has ended
  std::atomic<int> lost_{CUDA_SUCCESS};
  std::unique_ptr<EventPool> events_;
  std::unique_ptr<Retirement> retirement_;
  std::unique_ptr<Spans> spans_;
};

// Makes the device's context current on this thread and restores the former one; cheap where it is
// current already. Every call of the driver that touches a device is made under one: without it the
// call lands on whatever device the thread used last, or creates a context on device 0. The device
// must outlive it.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device& device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Device& device_;
  CUcontext former_ = nullptr;
};

}  // namespace weft::cuda
