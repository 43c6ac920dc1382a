// Memory that a device may read and write. A registration is an object: destroying it deregisters,
// and once that has returned the device touches the memory no more, unless the log says that it
// cannot be deregistered.
//
// Registering pins pages and takes 10 µs and more, so what is in use already is not registered
// again: a part of a range that somebody else holds a registration of, for the same access, shares
// it. Nothing is kept beyond its last user, as nobody tells when memory is given back to the
// system: an address that was mapped anew would still lead to the old pages.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weft/base/config.h>
#include <weft/base/slice.h>
#include <weft/transport/verbs/device.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport::verbs {

// What the device may do besides reading: nothing where memory is only sent, which so may be mapped
// read-only.
enum class Access { Read, Receive, RemoteWrite };

class Registration {
 public:
  // Throws Busy, saying how to allow more locked memory where that is the cause; Caller for memory
  // that does not allow the access; Unsupported for memory of a GPU.
  Registration(std::shared_ptr<Device> device, const Slice& memory, Access access);
  // One that has been made, of an allocation on that GPU. Does not keep the GPU.
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

  // Null where the memory is the host's, or its GPU is no longer in use.
  std::shared_ptr<cuda::Device> gpu() const { return gpu_.lock(); }
  // What the device has written here may be read from now on. Throws weft::Blame::Device; Cancelled
  // where the GPU is no longer in use.
  void flush() const;
  // Copies to or from memory of the GPU, and waits. Throws as flush().
  void copy(void* to, const void* from, std::size_t bytes) const;

 private:
  const std::shared_ptr<Device> device_;
  const Slice memory_;
  const Access access_;
  const std::weak_ptr<cuda::Device> gpu_;
  ibv_mr* region_ = nullptr;
};

// The allocations of GPUs that one device has registered (GPUDirect RDMA). That takes a
// millisecond, so they are kept, until they have been freed: whether one has is asked at each use,
// of all where another one is registered, and by a thread of its own every second, as a
// registration keeps freed memory from being given to others. Usable from every thread.
class GpuRegistrations {
 public:
  GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed);
  ~GpuRegistrations();
  GpuRegistrations(const GpuRegistrations&) = delete;
  GpuRegistrations& operator=(const GpuRegistrations&) = delete;

  // The one of the allocation that this memory lies in. It is in use as long as somebody holds what
  // is returned, which keeps the GPU as well. Throws Unsupported, with the reason, and what the
  // drivers throw; that and which way is taken is logged once for each GPU.
  std::shared_ptr<const Registration> of(const Slice& memory, cuda::Device& gpu);
  // One in use that covers the memory; null for everything else, such as the host's. Costs next to
  // nothing while no memory of a GPU is registered, and waits for nobody who registers some.
  std::shared_ptr<const Registration> at(const void* data, std::size_t bytes) const;

  // Lets go of what has been freed and is not in use.
  void forget_freed();
  // Allocations that are registered.
  std::size_t count() const { return count_; }

 private:
  struct Allocation {
    int gpu = 0;
    std::uint64_t base = 0;
    std::size_t bytes = 0;
    std::uint64_t number = 0;  // the driver's: it gives none twice
    bool operator==(const Allocation&) const = default;
  };
  struct Kept {
    Allocation of;
    std::weak_ptr<cuda::Device>
        gpu;  // which the registration asks; there may be several of one GPU
    std::shared_ptr<const Registration> registration;  // null where it was refused
    std::string why_not;
    bool is_in_use() const { return registration.use_count() > 1; }
  };
  using Allocations = std::map<std::uint64_t, Kept>;  // by address

  // Empty where memory of the GPU can be registered at all.
  std::string why_not(cuda::Device& gpu);
  std::string find_out_why_not(cuda::Device& gpu) const;
  // With its GPU, which stays meanwhile.
  using Found = std::pair<Kept, std::shared_ptr<cuda::Device>>;
  std::optional<Found> find(const Allocation& wanted) const;
  std::shared_ptr<const Registration> find_or_make(const Slice& memory, cuda::Device& gpu);
  // Under registering_.
  Kept make(const Allocation& wanted, cuda::Device& gpu);
  void keep(const Kept& made);
  using Gpus = std::vector<std::shared_ptr<cuda::Device>>;
  void drop_freed(Gpus& asked);  // which are let go of without the mutexes: the last reference to
                                 // one may end anything
  void count_registered();       // under the mutex
  void start_watcher(cuda::Device& gpu);
  void log_once(cuda::Device& gpu, const std::string& text, bool is_good);
  void watch(const std::stop_token& ending);

  const std::shared_ptr<Device> device_;
  const GpuDirect allowed_;
  std::mutex registering_;  // before the other one; held while the drivers are asked
  std::condition_variable_any ending_;
  std::jthread watcher_;      // from the first registration on
  mutable std::mutex mutex_;  // of what follows; held for a moment only
  Allocations kept_;
  std::vector<std::shared_ptr<const Registration>>
      replaced_;                        // their memory was freed and is somebody else's; in use
  std::map<int, std::string> reasons_;  // by GPU
  std::set<std::pair<int, std::string>> logged_;
  std::atomic<std::size_t> count_{0};  // of the registrations among all these
};

// How a device may register memory of GPUs, for people: "dma-buf", "nvidia_peermem is not loaded".
std::string describe_gpu_ways(const Device& device);

// The registrations of one device that are in use. Usable from every thread.
class RegistrationCache {
 public:
  explicit RegistrationCache(std::shared_ptr<Device> device, GpuDirect allowed = GpuDirect::Auto)
      : device_(device), gpus_(std::move(device), allowed) {}

  // One that covers the memory, which is the host's, or a GPU's that has been registered already.
  // What a peer may write to is of the host's memory that it is asked for and of no more, as the
  // peer gets its key. Throws as Registration's constructor.
  std::shared_ptr<const Registration> of(const void* data, std::size_t bytes, Access access);
  GpuRegistrations& gpus() { return gpus_; }
  std::size_t in_use() const;

 private:
  using Entries = std::multimap<const std::byte*, std::weak_ptr<const Registration>>;
  std::shared_ptr<const Registration> find(const void* data, std::size_t bytes,
                                           Access access) const;

  const std::shared_ptr<Device> device_;
  GpuRegistrations gpus_;
  mutable std::mutex mutex_;
  Entries entries_;  // by address
};

}  // namespace weft::transport::verbs
