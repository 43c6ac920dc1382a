// SPDX-License-Identifier: Apache-2.0
// One GPU as this process uses it: its primary context (which libtorch and NCCL also use), its
// properties, and the parts that all work on it shares, such as the pool of events and the
// retirement.
//
// It is held by shared_ptr, because fences, pinned blocks and device memory outlive their makers.
// Any thread may use it.
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
  // How the GPU sees what a NIC writes to its memory (GPUDirect RDMA): in order; only after
  // flush_remote_writes() (rdma.h); or not reliably, so that a NIC must not write there.
  enum class RemoteWrites { Ordered, Flushed, Unseen };
  // Read once. The 32-bit stream memory operations have no attribute: every driver that has the
  // functions supports them.
  struct Properties {
    std::string name;
    int compute_capability = 0;  // 90 for 9.0
    int multiprocessors = 0;
    bool mem_ops_64_bit = false;       // cuStreamWaitValue64 and related functions
    bool flush_remote_writes = false;  // a wait can flush a NIC's writes
    bool rdma = false;                 // a NIC may read and write the memory
    bool dma_buf = false;              // memory can be exported to a NIC
    RemoteWrites remote_writes = RemoteWrites::Unseen;
    bool virtual_memory = false;  // cuMemCreate and related functions
    bool memory_pools = false;    // stream-ordered allocation
    int least_priority = 0;       // priorities of streams; lower numbers run first
    int greatest_priority = 0;
  };

  // Returns the number of GPUs that this process sees.
  static int count(const Driver& driver);
  // Retains the primary context; the first user of a GPU creates it, which takes tenths of a
  // second. Throws Caller if there is no GPU with this index.
  static std::shared_ptr<Device> open(std::shared_ptr<const Driver> driver, int index);
  Device(Key, std::shared_ptr<const Driver> driver, int index);
  // Resources that were retired and never reclaimed are left to the end of the context.
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return *driver_; }
  int index() const { return index_; }
  CUcontext context() const { return context_; }
  const Properties& properties() const { return properties_; }
  // The name of this GPU in a Slice.
  weft::Device id() const { return weft::Device::cuda(index_); }

  EventPool& events() { return *events_; }
  Retirement& retirement() { return *retirement_; }
  Spans& spans() { return *spans_; }

  // Throws cuda::error_of() for a failed call, with the device in the text. Remembers an error that
  // ends the context.
  void check(CUresult result, std::string_view what, Place place = Place::current()) {
    if (result != CUDA_SUCCESS) fail(result, what, place);
  }

  // Set once a call has reported that the context has ended: nothing enqueued on this device will
  // ever run, and every fence on it counts as passed. Code that finishes an Op by a fence on this
  // device checks this first.
  std::optional<Error> lost() const;
  bool is_lost() const noexcept { return lost_.load(std::memory_order_acquire) != CUDA_SUCCESS; }
  // Marks the device as lost; the first cause stays. For code that sees an error and must not
  // throw.
  void lose(CUresult cause) noexcept;
  // Asks the driver whether the context is still alive (about a microsecond). Returns false if it
  // has ended.
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
  CUevent never_recorded_ = nullptr;  // querying it fails only if the context has ended
  std::atomic<int> lost_{CUDA_SUCCESS};
  std::unique_ptr<EventPool> events_;
  std::unique_ptr<Retirement> retirement_;
  std::unique_ptr<Spans> spans_;
};

// Makes the device's context current on this thread and restores the former one; cheap if it is
// already current. Every call of the driver that touches a device needs one: without it, the call
// acts on the device that the thread used last, or creates a context on device 0. The device must
// outlive it.
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
