// Memory of GPUs, registered with an RDMA device: as a dma-buf, which the kernel's drivers hand to each other, or by
// address, where the module nvidia_peermem knows those of GPUs.
#include <cerrno>
#include <cstring>

#include <unistd.h>

#include <weft/base/log.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/rdma.h>
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr std::size_t kMostKept = 1024;  // allocations, of one device

// Why the device takes no dma-bufs; nothing where it does. It is asked for one that is none: who knows the call minds the
// descriptor, who does not minds the call.
std::optional<std::string> why_no_dma_buf(const Device& device) {
  const auto call = device.library().reg_dmabuf_mr;
  if (call == nullptr) return "libibverbs is older than rdma-core 34 and knows no dma-buf";
  errno = 0;
  if (ibv_mr* const made = call(device.domain(), 0, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), 0, -1, kAccess)) {
    device.library().dereg_mr(made);
    return std::nullopt;
  }
  if (errno == EOPNOTSUPP || errno == EPROTONOSUPPORT || errno == ENOSYS) {
    return device.name() + " registers no dma-buf (" + std::strerror(errno) + ")";
  }
  return std::nullopt;
}

bool has_peer_memory() {
  for (const char* const file : {"/sys/module/nvidia_peermem/version", "/sys/kernel/mm/memory_peers/nv_mem/version",
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
  return (no_dma_buf ? *no_dma_buf : device.name() + " registers dma-buf") + "; nvidia_peermem is " +
         (has_peer_memory() ? "loaded" : "not loaded");
}

void Registration::flush() const {
  if (const auto gpu = gpu_.lock()) cuda::flush_remote_writes(*gpu);
}

void Registration::copy(void* to, const void* from, std::size_t bytes) const {
  const auto gpu = gpu_.lock();
  if (!gpu) throw Error(Blame::Cancelled, "the GPU of this memory is no longer in use");
  cuda::copy_and_wait(*gpu, to, from, bytes);
}

GpuRegistrations::GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed)
    : device_(std::move(device)), allowed_(allowed) {}

const std::optional<std::string>& GpuRegistrations::why_not(cuda::Device& gpu) {
  const auto [known, is_new] = reasons_.try_emplace(gpu.index());
  if (!is_new) return known->second;
  const std::string name = weft::describe(gpu.id());
  std::optional<std::string>& why = known->second;
  if (allowed_ == GpuDirect::Off) {
    why = "WEFT_GPUDIRECT is off";
  } else if (!gpu.properties().rdma) {
    why = name + " lets no other device at its memory";
  } else if (gpu.properties().remote_writes == cuda::Device::RemoteWrites::Unseen) {
    why = name + " sees what others write in no order that could be told";
  } else if (!may_try_peer_memory(allowed_)) {
    why = gpu.properties().dma_buf ? why_no_dma_buf(*device_) : name + " exports no dma-buf";
    if (why && allowed_ == GpuDirect::Auto) *why += ", and the kernel module nvidia_peermem is not loaded";
  }
  return why;
}

void GpuRegistrations::log_once(cuda::Device& gpu, const std::string& text, bool is_good) {
  if (!logged_.insert({gpu.index(), is_good}).second) return;
  const std::string whole = "verbs: memory of " + weft::describe(gpu.id()) + " " + text;
  is_good ? log::info(whole) : log::warn(whole);
}

GpuRegistrations::Kept GpuRegistrations::make(std::uint64_t base, std::size_t bytes, cuda::Device& gpu) {
  const Slice whole{reinterpret_cast<void*>(base), bytes, gpu.id()};
  const auto adopt = [&](ibv_mr* region) {
    return Kept{
        .gpu = gpu.index(),
        .registration = std::make_shared<const Registration>(device_, whole, region, gpu.weak_from_this()),
    };
  };
  std::string why;
  if (allowed_ != GpuDirect::PeerMemory) {
    try {
      if (const auto no_dma_buf = why_no_dma_buf(*device_)) throw Error(Blame::Unsupported, *no_dma_buf);
      const cuda::DmaBuf exported(gpu, base, bytes);
      if (ibv_mr* const region = device_->library().reg_dmabuf_mr(device_->domain(), exported.offset(), bytes, base,
                                                                  exported.descriptor(), kAccess)) {
        log_once(gpu, "is read and written by " + device_->name() + " itself, registered as dma-buf", true);
        return adopt(region);
      }
      why = "ibv_reg_dmabuf_mr: " + std::string(std::strerror(errno));
    } catch (const Error& error) {
      if (error.blame() != Blame::Unsupported) throw;
      why = error.text();
    }
  }
  if (may_try_peer_memory(allowed_)) {
    if (ibv_mr* const region = device_->library().reg_mr(device_->domain(), whole.data, bytes, kAccess)) {
      log_once(gpu, "is read and written by " + device_->name() + " itself, through nvidia_peermem", true);
      return adopt(region);
    }
    why += (why.empty() ? "" : "; ") + std::string("nvidia_peermem, ibv_reg_mr: ") + std::strerror(errno);
  }
  return Kept{.gpu = gpu.index(), .why_not = why};
}

// By now they are others', or of another GPU's driver.
void GpuRegistrations::forget_freed() {
  std::erase_if(kept_, [&](const auto& entry) {
    const auto& [base, kept] = entry;
    const auto gpu = kept.registration ? kept.registration->gpu() : nullptr;
    if (!gpu) return true;
    try {
      const auto now = cuda::allocation_of(*gpu, base);
      return now.base != base || now.id != kept.id;
    } catch (const Error&) {
      return true;
    }
  });
  if (kept_.size() >= kMostKept) {
    std::erase_if(kept_, [](const auto& entry) { return entry.second.registration.use_count() <= 1; });
  }
}

std::shared_ptr<const Registration> GpuRegistrations::of(const Slice& memory, cuda::Device& gpu) {
  std::lock_guard lock(mutex_);
  const auto refuse = [&](const std::string& why) -> Error {
    log_once(gpu, "goes through pinned memory: " + why, false);
    return Error(Blame::Unsupported,
                 "memory of " + weft::describe(gpu.id()) + " is not moved by " + device_->name() + " itself: " + why);
  };
  if (const auto& why = why_not(gpu)) throw refuse(*why);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data);
  const cuda::AllocationRange range = cuda::allocation_of(gpu, address);
  if (address < range.base || memory.bytes > range.bytes || address - range.base > range.bytes - memory.bytes) {
    throw refuse("some of it lies across several allocations");
  }
  auto kept = kept_.find(range.base);
  const bool is_known = kept != kept_.end() && kept->second.id == range.id && kept->second.gpu == gpu.index() &&
                        (!kept->second.registration || kept->second.registration->gpu());
  if (!is_known) {
    forget_freed();
    Kept made = make(range.base, range.bytes, gpu);
    made.id = range.id;
    kept = kept_.insert_or_assign(range.base, std::move(made)).first;
    count_ = kept_.size();
  }
  if (!kept->second.registration) throw refuse(kept->second.why_not);
  return kept->second.registration;
}

std::shared_ptr<const Registration> GpuRegistrations::at(const void* data, std::size_t bytes) const {
  if (count_.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard lock(mutex_);
  const auto after = kept_.upper_bound(reinterpret_cast<std::uintptr_t>(data));
  if (after == kept_.begin()) return nullptr;
  const auto& registration = std::prev(after)->second.registration;
  return registration && registration->covers(data, bytes) && registration->gpu() ? registration : nullptr;
}

}  // namespace weft::transport::verbs
