// SPDX-License-Identifier: Apache-2.0
// Memory that a device may read or write. Destroying a registration deregisters the memory. After
// that the device does not access the memory any more, unless the log reports that it could not be
// deregistered.
//
// Registering pins pages and takes 10 µs or more, so memory inside a registration that is in use,
// for the same access, shares that registration. Registrations of host memory are not kept beyond
// their last user, because no notice arrives when memory is unmapped: an address that was mapped
// anew would still lead to the old pages.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weft/base/config.h>
#include <weft/base/mutex.h>
#include <weft/base/slice.h>
#include <weft/transport/verbs/device.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport::verbs {

// How the device may use the memory. Memory that is only sent needs Read, so it may be mapped
// read-only.
enum class Access { Read, Receive, RemoteWrite };

class Registration {
 public:
  // Registers host memory. Throws Busy (with advice, if the limit of locked memory is the cause),
  // Caller if the memory does not allow the access, Unsupported for memory of a GPU.
  Registration(std::shared_ptr<Device> device, const Slice& memory, Access access);
  // Adopts a registration of an allocation on `gpu`. Does not keep the GPU open.
  Registration(std::shared_ptr<Device> device, const Slice& memory, ibv_mr* region,
               std::weak_ptr<cuda::Device> gpu);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const Slice& memory() const { return memory_; }
  Access access() const { return access_; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }
  bool covers(const void* data, std::size_t bytes) const;

  // Null for host memory, or if the GPU is no longer in use.
  std::shared_ptr<cuda::Device> gpu() const { return gpu_.lock(); }
  // Makes the device's earlier writes to this memory visible. Throws weft::Blame::Device, or
  // Cancelled if the GPU is no longer in use.
  void flush() const;
  // Copies to or from the GPU's memory and blocks until the copy is done. Throws the errors of
  // flush().
  void copy(void* to, const void* from, std::size_t bytes) const;

 private:
  const std::shared_ptr<Device> device_;
  const Slice memory_;
  const Access access_;
  const std::weak_ptr<cuda::Device> gpu_;
  ibv_mr* region_ = nullptr;
};

// The GPU allocations that one RDMA device has registered (GPUDirect RDMA). Registering takes a
// millisecond, so registrations are kept until the allocation has been freed. A registration keeps
// freed memory from being reused, so each use checks whether its allocation has been freed; all
// allocations are checked before another is registered, and every second by a thread. Thread-safe.
class GpuRegistrations {
 public:
  GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed);
  ~GpuRegistrations();
  GpuRegistrations(const GpuRegistrations&) = delete;
  GpuRegistrations& operator=(const GpuRegistrations&) = delete;

  // Returns the registration of the allocation that contains `memory`; makes it if there is none.
  // The returned pointer keeps the registration in use and the GPU open. Throws Unsupported, with
  // the reason, and the drivers' errors. Logs the chosen way, or the reason against it, once for
  // each GPU.
  std::shared_ptr<const Registration> of(const Slice& memory, cuda::Device& gpu);
  // Returns a registration that is in use and covers the memory; null if there is none, such as for
  // host memory. Costs next to nothing while no GPU memory is registered, and never waits for a
  // registration in progress.
  std::shared_ptr<const Registration> at(const void* data, std::size_t bytes) const;

  // Deregisters allocations that have been freed and are not in use.
  void forget_freed();
  // Number of registered allocations.
  std::size_t count() const { return count_; }

 private:
  struct Allocation {
    int gpu = 0;
    std::uint64_t base = 0;
    std::size_t bytes = 0;
    std::uint64_t number = 0;  // the driver's id, which is never reused
    bool operator==(const Allocation&) const = default;
  };
  struct Kept {
    Allocation of;
    // The object that the registration uses; several may exist for one GPU.
    std::weak_ptr<cuda::Device> gpu;
    std::shared_ptr<const Registration> registration;  // null if registering failed
    std::string why_not;
    bool is_in_use() const { return registration.use_count() > 1; }
  };
  using Allocations = std::map<std::uint64_t, Kept>;  // by address

  // Why the GPU's memory cannot be registered at all; empty if it can be.
  std::string why_not(cuda::Device& gpu);
  std::string find_out_why_not(cuda::Device& gpu) const;
  // An entry and its GPU, which stays open meanwhile.
  using Found = std::pair<Kept, std::shared_ptr<cuda::Device>>;
  std::optional<Found> find(const Allocation& wanted) const;
  std::shared_ptr<const Registration> find_or_make(const Slice& memory, cuda::Device& gpu);
  Kept make(const Allocation& wanted, cuda::Device& gpu) WEFT_REQUIRES(registering_);
  void keep(const Kept& made) WEFT_REQUIRES(registering_);
  using Gpus = std::vector<std::shared_ptr<cuda::Device>>;
  // Deregisters freed allocations. Appends the GPUs that it asked to `asked`: the caller must drop
  // them after it has released the mutexes, because dropping the last reference may run any
  // destructor.
  void drop_freed(Gpus& asked) WEFT_REQUIRES(registering_);
  void count_registered() WEFT_REQUIRES(mutex_);
  void start_watcher(cuda::Device& gpu) WEFT_REQUIRES(registering_);
  void log_once(cuda::Device& gpu, const std::string& text, bool is_good);
  void watch(const std::stop_token& ending);

  const std::shared_ptr<Device> device_;
  const GpuDirect allowed_;
  Mutex registering_;  // locked before mutex_; held during calls of the drivers
  std::condition_variable_any ending_;
  std::jthread watcher_ WEFT_GUARDED_BY(registering_);  // runs from the first registration on
  mutable Mutex mutex_;                                 // held only briefly
  Allocations kept_ WEFT_GUARDED_BY(mutex_);
  // Registrations that are in use although their memory was freed and has been allocated again.
  std::vector<std::shared_ptr<const Registration>> replaced_ WEFT_GUARDED_BY(mutex_);
  // Why GPUs cannot be registered, by index.
  std::map<int, std::string> reasons_ WEFT_GUARDED_BY(mutex_);
  std::set<std::pair<int, std::string>> logged_ WEFT_GUARDED_BY(mutex_);
  std::atomic<std::size_t> count_{0};  // number of registrations in kept_ and replaced_
};

// Describes how a device can register GPU memory, for weft-info: "rxe0 registers dma-buf;
// nvidia_peermem is not loaded".
std::string describe_gpu_ways(const Device& device);

// The registrations of one device that are in use. Thread-safe.
class RegistrationCache {
 public:
  explicit RegistrationCache(std::shared_ptr<Device> device, GpuDirect allowed = GpuDirect::Auto)
      : device_(device), gpus_(std::move(device), allowed) {}

  // Returns a registration that covers the memory: host memory, or GPU memory that has already been
  // registered. For RemoteWrite to host memory it covers exactly this memory, because the peer gets
  // its key. Throws the errors of Registration's constructor.
  std::shared_ptr<const Registration> of(const void* data, std::size_t bytes, Access access);
  GpuRegistrations& gpus() { return gpus_; }
  std::size_t in_use() const;

 private:
  using Entries = std::multimap<const std::byte*, std::weak_ptr<const Registration>>;
  std::shared_ptr<const Registration> find(const void* data, std::size_t bytes, Access access) const
      WEFT_REQUIRES(mutex_);

  const std::shared_ptr<Device> device_;
  GpuRegistrations gpus_;
  mutable Mutex mutex_;
  Entries entries_ WEFT_GUARDED_BY(mutex_);  // by address
};

}  // namespace weft::transport::verbs
