// Memory that a device may read and write. A registration is an object: destroying it deregisters, and once that has
// returned the device touches the memory no more.
//
// Registering pins pages and takes 10 µs and more, so what is in use already is not registered again: a part of a range
// that somebody else holds a registration of shares it. Nothing is kept beyond its last user, as nobody tells when memory
// is given back to the system: an address that was mapped anew would still lead to the old pages.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <weft/base/config.h>
#include <weft/base/slice.h>
#include <weft/transport/verbs/device.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport::verbs {

class Registration {
 public:
  // Throws Busy, saying how to allow more locked memory where that is the cause; Unsupported for memory of a GPU.
  Registration(std::shared_ptr<Device> device, const Slice& memory);
  // One that has been made, of an allocation on that GPU. Does not keep the GPU.
  Registration(std::shared_ptr<Device> device, const Slice& memory, ibv_mr* region, std::weak_ptr<cuda::Device> gpu);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const Slice& memory() const { return memory_; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }
  bool covers(const void* data, std::size_t bytes) const;

  // Null where the memory is the host's, or its GPU is no longer in use.
  std::shared_ptr<cuda::Device> gpu() const { return gpu_.lock(); }
  // What the device has written here may be read from now on. Throws weft::Blame::Device.
  void flush() const;
  // Copies to or from memory of the GPU, and waits. Throws Device.
  void copy(void* to, const void* from, std::size_t bytes) const;

 private:
  const std::shared_ptr<Device> device_;
  const Slice memory_;
  const std::weak_ptr<cuda::Device> gpu_;
  ibv_mr* region_ = nullptr;
};

// The allocations of GPUs that one device has registered (GPUDirect RDMA). That takes a millisecond, so they are kept,
// until they have been freed: whether one has is asked at each use, and of all where another one is registered. Usable from
// every thread.
class GpuRegistrations {
 public:
  GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed);

  // The one of the allocation that this memory lies in. Throws Unsupported, with the reason; that and which way is taken is
  // logged once for each GPU.
  std::shared_ptr<const Registration> of(const Slice& memory, cuda::Device& gpu);
  // One that covers the memory; null where it is not a GPU's, or has not been registered. Costs next to nothing while no
  // memory of a GPU is.
  std::shared_ptr<const Registration> at(const void* data, std::size_t bytes) const;

 private:
  struct Kept {
    std::uint64_t id = 0;  // of the allocation
    int gpu = 0;
    std::shared_ptr<const Registration> registration;
    std::string why_not;
  };
  // All under the mutex. Nothing where memory of the GPU can be registered at all.
  const std::optional<std::string>& why_not(cuda::Device& gpu);
  Kept make(std::uint64_t base, std::size_t bytes, cuda::Device& gpu);
  void forget_freed();
  void log_once(cuda::Device& gpu, const std::string& text, bool is_good);

  const std::shared_ptr<Device> device_;
  const GpuDirect allowed_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Kept> kept_;                 // by address
  std::map<int, std::optional<std::string>> reasons_;  // by GPU
  std::set<std::pair<int, bool>> logged_;
  std::atomic<std::size_t> count_{0};  // of what is kept
};

// How a device may register memory of GPUs, for people: "dma-buf", "nvidia_peermem is not loaded".
std::string describe_gpu_ways(const Device& device);

// The registrations of one device that are in use. Usable from every thread.
class RegistrationCache {
 public:
  explicit RegistrationCache(std::shared_ptr<Device> device, GpuDirect allowed = GpuDirect::Auto)
      : device_(device), gpus_(std::move(device), allowed) {}

  // One that covers the memory, which is the host's, or a GPU's that has been registered already. Throws as Registration's
  // constructor.
  std::shared_ptr<const Registration> of(const void* data, std::size_t bytes);
  GpuRegistrations& gpus() { return gpus_; }
  std::size_t in_use() const;

 private:
  using Entries = std::multimap<const std::byte*, std::weak_ptr<const Registration>>;
  std::shared_ptr<const Registration> find(const void* data, std::size_t bytes) const;

  const std::shared_ptr<Device> device_;
  GpuRegistrations gpus_;
  mutable std::mutex mutex_;
  Entries entries_;  // by address
};

}  // namespace weft::transport::verbs
