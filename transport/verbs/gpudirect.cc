// SPDX-License-Identifier: Apache-2.0
// Registers GPU memory with an RDMA device: as a dma-buf, which one kernel driver hands to another,
// or by address, if the module nvidia_peermem is loaded, which knows GPU addresses.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <unistd.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/rdma.h>
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr std::size_t kMostKept = 1024;  // allocations of one device
// How often the watcher looks for allocations that have been freed.
constexpr auto kWatched = std::chrono::seconds(1);

// Why the device does not register dma-bufs; empty if it does. Tries an invalid descriptor: a
// driver that supports the call rejects the descriptor, another one rejects the call.
std::optional<std::string> why_no_dma_buf(const Device& device) {
  const auto call = device.library().reg_dmabuf_mr;
  if (call == nullptr) return "libibverbs is older than rdma-core 34 and cannot register dma-bufs";
  errno = 0;
  if (ibv_mr* const made = call(
          device.domain(), 0, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), 0, -1, kAccess)) {
    device.library().dereg_mr(made);
    return std::nullopt;
  }
  if (errno == EOPNOTSUPP || errno == EPROTONOSUPPORT || errno == ENOSYS) {
    return device.name() + " registers no dma-buf (" + std::strerror(errno) + ")";
  }
  return std::nullopt;
}

bool has_peer_memory() {
  for (const char* const file :
       {"/sys/module/nvidia_peermem/version", "/sys/kernel/mm/memory_peers/nv_mem/version",
        "/sys/kernel/mm/memory_peers/nv_mem_nc/version"}) {
    if (::access(file, F_OK) == 0) return true;
  }
  return false;
}

bool may_try_peer_memory(GpuDirect allowed) {
  return allowed == GpuDirect::PeerMemory || (allowed == GpuDirect::Auto && has_peer_memory());
}

}  // namespace

std::string describe_gpu_ways(const Device& device) {
  const auto no_dma_buf = why_no_dma_buf(device);
  return (no_dma_buf ? *no_dma_buf : device.name() + " registers dma-buf") +
         "; nvidia_peermem is " + (has_peer_memory() ? "loaded" : "not loaded");
}

void Registration::flush() const {
  if (memory_.device.is_host()) return;
  const auto gpu = gpu_.lock();
  if (!gpu) throw Error(Blame::Cancelled, "the GPU of this memory is no longer in use");
  cuda::flush_remote_writes(*gpu);
}

void Registration::copy(void* to, const void* from, std::size_t bytes) const {
  const auto gpu = gpu_.lock();
  if (!gpu) throw Error(Blame::Cancelled, "the GPU of this memory is no longer in use");
  cuda::copy_and_wait(*gpu, to, from, bytes);
}

GpuRegistrations::GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed)
    : device_(std::move(device)), allowed_(allowed) {}

GpuRegistrations::~GpuRegistrations() {
  watcher_.request_stop();
  // This runs on the watcher's own thread if the watcher dropped the last reference to a GPU and
  // that destroyed this object.
  if (watcher_.get_id() == std::this_thread::get_id()) watcher_.detach();
  if (watcher_.joinable()) watcher_.join();
}

std::string GpuRegistrations::find_out_why_not(cuda::Device& gpu) const {
  const std::string name = weft::describe(gpu.id());
  if (allowed_ == GpuDirect::Off) return "WEFT_GPUDIRECT is off";
  if (!gpu.properties().rdma) return name + " does not let other devices access its memory";
  if (gpu.properties().remote_writes == cuda::Device::RemoteWrites::Unseen) {
    return name + " does not see the writes of other devices in a defined order";
  }
  if (may_try_peer_memory(allowed_)) return "";
  const auto no_dma_buf =
      gpu.properties().dma_buf ? why_no_dma_buf(*device_) : name + " exports no dma-buf";
  if (!no_dma_buf) return "";
  return *no_dma_buf + (allowed_ == GpuDirect::Auto
                            ? ", and the kernel module nvidia_peermem is not loaded"
                            : "");
}

std::string GpuRegistrations::why_not(cuda::Device& gpu) {
  {
    MutexLock lock(mutex_);
    if (const auto known = reasons_.find(gpu.index()); known != reasons_.end())
      return known->second;
  }
  MutexLock registering(registering_);
  std::string why = find_out_why_not(gpu);
  MutexLock lock(mutex_);
  return reasons_.try_emplace(gpu.index(), std::move(why)).first->second;
}

void GpuRegistrations::log_once(cuda::Device& gpu, const std::string& text, bool is_good) {
  {
    MutexLock lock(mutex_);
    if (!logged_.insert({gpu.index(), text}).second) return;
  }
  const std::string whole = "verbs: memory of " + weft::describe(gpu.id()) + " " + text;
  is_good ? log::info(whole) : log::warn(whole);
}

GpuRegistrations::Kept GpuRegistrations::make(const Allocation& wanted, cuda::Device& gpu) {
  const Slice whole{reinterpret_cast<void*>(wanted.base), wanted.bytes, gpu.id()};
  const auto adopt = [&](ibv_mr* region) {
    auto registration =
        std::make_shared<const Registration>(device_, whole, region, gpu.weak_from_this());
    return Kept{wanted, gpu.weak_from_this(), std::move(registration), ""};
  };
  std::string why;
  if (allowed_ != GpuDirect::PeerMemory) {
    try {
      if (const auto no_dma_buf = why_no_dma_buf(*device_))
        throw Error(Blame::Unsupported, *no_dma_buf);
      const cuda::DmaBuf exported(gpu, wanted.base, wanted.bytes);
      if (ibv_mr* const region =
              device_->library().reg_dmabuf_mr(device_->domain(), exported.offset(), wanted.bytes,
                                               wanted.base, exported.descriptor(), kAccess)) {
        log_once(gpu,
                 "is read and written by " + device_->name() + " itself, registered as dma-buf",
                 true);
        return adopt(region);
      }
      why = "ibv_reg_dmabuf_mr: " + std::string(std::strerror(errno));
    } catch (const Error& error) {
      if (error.blame() != Blame::Unsupported) throw;
      why = error.text();
    }
  }
  if (may_try_peer_memory(allowed_)) {
    if (ibv_mr* const region =
            device_->library().reg_mr(device_->domain(), whole.data, wanted.bytes, kAccess)) {
      log_once(gpu, "is read and written by " + device_->name() + " itself, through nvidia_peermem",
               true);
      return adopt(region);
    }
    why += (why.empty() ? "" : "; ") + std::string("nvidia_peermem, ibv_reg_mr: ") +
           std::strerror(errno);
  }
  return Kept{wanted, gpu.weak_from_this(), nullptr, why};
}

std::optional<GpuRegistrations::Found> GpuRegistrations::find(const Allocation& wanted) const {
  MutexLock lock(mutex_);
  const auto kept = kept_.find(wanted.base);
  if (kept == kept_.end() || kept->second.of != wanted) return std::nullopt;
  // The GPU may have been closed and opened again; then it has another context.
  auto gpu = kept->second.gpu.lock();
  if (!gpu) return std::nullopt;
  return Found(kept->second, std::move(gpu));
}

// Adds `made`, and removes the entries whose addresses overlap it: their memory must have been
// freed.
void GpuRegistrations::keep(const Kept& made) {
  std::vector<Kept> gone;  // deregistered after mutex_ has been released
  MutexLock lock(mutex_);
  const auto erase_if = [&](const auto& is_wanted) WEFT_REQUIRES(mutex_) {
    for (auto entry = kept_.begin(); entry != kept_.end();) {
      Kept& kept = entry->second;
      if (!is_wanted(kept)) {
        ++entry;
        continue;
      }
      if (kept.is_in_use()) replaced_.push_back(kept.registration);
      gone.push_back(std::move(kept));
      entry = kept_.erase(entry);
    }
  };
  erase_if([&](const Kept& kept) {
    return kept.of.base < made.of.base + made.of.bytes &&
           made.of.base < kept.of.base + kept.of.bytes;
  });
  if (kept_.size() >= kMostKept) erase_if([](const Kept& kept) { return !kept.is_in_use(); });
  kept_.emplace(made.of.base, made);
  count_registered();
}

void GpuRegistrations::count_registered() {
  const auto kept = std::ranges::count_if(
      kept_, [](const auto& entry) { return entry.second.registration != nullptr; });
  count_ = static_cast<std::size_t>(kept) + replaced_.size();
}

void GpuRegistrations::drop_freed(Gpus& asked) {
  const auto is_there = [&](const auto& seen) {
    const auto gpu = seen.second.lock();
    if (!gpu) return false;
    asked.push_back(gpu);
    try {
      const auto now = cuda::allocation_of(*gpu, seen.first.base);
      return now.base == seen.first.base && now.id == seen.first.number;
    } catch (const Error&) {  // no allocation there, or the GPU is lost
      return false;
    }
  };
  std::vector<std::pair<Allocation, std::weak_ptr<cuda::Device>>> freed;
  {
    MutexLock lock(mutex_);
    for (const auto& [base, kept] : kept_) freed.emplace_back(kept.of, kept.gpu);
  }
  std::erase_if(freed, is_there);
  std::vector<std::shared_ptr<const Registration>>
      gone;  // deregistered after mutex_ has been released
  MutexLock lock(mutex_);
  for (const auto& [allocation, gpu] : freed) {
    const auto entry = kept_.find(allocation.base);
    if (entry->second.is_in_use()) continue;
    gone.push_back(std::move(entry->second.registration));
    kept_.erase(entry);
  }
  std::erase_if(replaced_, [&](auto& registration) {
    if (registration.use_count() > 1) return false;
    gone.push_back(std::move(registration));
    return true;
  });
  count_registered();
}

void GpuRegistrations::forget_freed() {
  Gpus asked;
  MutexLock registering(registering_);
  drop_freed(asked);
}

// Starts the watcher. If no thread can be started, the next registration tries again.
void GpuRegistrations::start_watcher(cuda::Device& gpu) {
  if (watcher_.joinable()) return;
  try {
    watcher_ = std::jthread([this](const std::stop_token& ending) { watch(ending); });
    pthread_setname_np(watcher_.native_handle(), "weft-gpu-memory");
  } catch (const std::system_error& error) {
    log_once(gpu,
             std::string("stays allocated after it has been freed, until more is registered: the "
                         "thread that checks cannot be started (") +
                 error.what() + "); allow this user more threads (ulimit -u)",
             false);
  }
}

void GpuRegistrations::watch(const std::stop_token& ending) {
  while (!ending.stop_requested()) {
    Gpus asked;  // dropped last; that may destroy this object
    UniqueLock registering(registering_);
    ending_.wait_for(registering, ending, kWatched, [] { return false; });
    if (!ending.stop_requested() && count_ > 0) drop_freed(asked);
  }
}

std::shared_ptr<const Registration> GpuRegistrations::of(const Slice& memory, cuda::Device& gpu) {
  try {
    return find_or_make(memory, gpu);
  } catch (...) {
    const Error why = to_error(std::current_exception(), Blame::Busy);
    if (why.blame() != Blame::Unsupported && !gpu.is_lost())
      log_once(gpu, "goes through pinned memory: " + why.text(), false);
    throw;
  }
}

std::shared_ptr<const Registration> GpuRegistrations::find_or_make(const Slice& memory,
                                                                   cuda::Device& gpu) {
  const auto refuse = [&](const std::string& why) -> Error {
    log_once(gpu, "goes through pinned memory: " + why, false);
    return Error(Blame::Unsupported, "memory of " + weft::describe(gpu.id()) + " is not moved by " +
                                         device_->name() + " itself: " + why);
  };
  if (const std::string why = why_not(gpu); !why.empty()) throw refuse(why);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data);
  const cuda::AllocationRange range = cuda::allocation_of(gpu, address);
  if (address < range.base || memory.bytes > range.bytes ||
      address - range.base > range.bytes - memory.bytes) {
    throw refuse("it lies across several allocations");
  }
  const Allocation wanted{gpu.index(), range.base, range.bytes, range.id};
  auto found = find(wanted);
  if (!found) {
    Gpus asked;
    MutexLock registering(registering_);
    found = find(wanted);
    if (!found) {
      drop_freed(asked);
      found = Found(make(wanted, gpu), gpu.shared_from_this());
      keep(found->first);
      start_watcher(gpu);
    }
  }
  auto& [kept, its_gpu] = *found;
  if (!kept.registration) throw refuse(kept.why_not);
  using Use = std::pair<std::shared_ptr<const Registration>, std::shared_ptr<cuda::Device>>;
  const auto* const registration = kept.registration.get();
  return {std::make_shared<const Use>(std::move(kept.registration), std::move(its_gpu)),
          registration};
}

std::shared_ptr<const Registration> GpuRegistrations::at(const void* data,
                                                         std::size_t bytes) const {
  if (count_.load(std::memory_order_acquire) == 0) return nullptr;
  MutexLock lock(mutex_);
  const auto is_wanted = [&](const auto& registration) {
    return registration.use_count() > 1 && registration->covers(data, bytes);
  };
  if (const auto after = kept_.upper_bound(reinterpret_cast<std::uintptr_t>(data));
      after != kept_.begin()) {
    if (const auto& registration = std::prev(after)->second.registration; is_wanted(registration))
      return registration;
  }
  const auto found = std::ranges::find_if(replaced_, is_wanted);
  return found == replaced_.end() ? nullptr : *found;
}

}  // namespace weft::transport::verbs
