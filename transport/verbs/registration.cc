#include <cerrno>

#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

}  // namespace

Registration::Registration(std::shared_ptr<Device> device, const Slice& memory)
    : device_(std::move(device)), memory_(memory) {
  const std::string what = device_->name() + ": " + std::to_string(memory.bytes) + " bytes of " + describe(memory.device) +
                           " cannot be registered";
  if (!memory.device.is_host()) throw Error(Blame::Unsupported, what + ": verbs moves host memory only; stage it");
  region_ = device_->library().reg_mr(device_->domain(), memory.data, memory.bytes, kAccess);
  if (region_ != nullptr) return;
  const int number = errno;
  const bool is_locking = number == ENOMEM || number == EPERM;
  throw system_error(Blame::Busy, what + (is_locking ? " (raise the limit of locked memory: ulimit -l unlimited)" : ""),
                     number);
}

Registration::Registration(std::shared_ptr<Device> device, const Slice& memory, ibv_mr* region,
                           std::weak_ptr<cuda::Device> gpu)
    : device_(std::move(device)), memory_(memory), gpu_(std::move(gpu)), region_(region) {}

Registration::~Registration() { device_->library().dereg_mr(region_); }

bool Registration::covers(const void* data, std::size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(memory_.data);
  const auto* const first = static_cast<const std::byte*>(data);
  return first >= begin && bytes <= memory_.bytes && static_cast<std::size_t>(first - begin) <= memory_.bytes - bytes;
}

std::shared_ptr<const Registration> RegistrationCache::find(const void* data, std::size_t bytes) const {
  for (auto entry = entries_.upper_bound(static_cast<const std::byte*>(data)); entry != entries_.begin();) {
    --entry;
    const auto registration = entry->second.lock();
    if (registration && registration->covers(data, bytes)) return registration;
  }
  return nullptr;
}

std::shared_ptr<const Registration> RegistrationCache::of(const void* data, std::size_t bytes) {
  if (auto of_gpu = gpus_.at(data, bytes)) return of_gpu;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    if (auto found = find(data, bytes)) return found;
  }
  const Slice memory{const_cast<void*>(data), bytes, weft::Device::host()};
  auto made = std::make_shared<const Registration>(device_, memory);
  std::lock_guard lock(mutex_);
  entries_.emplace(static_cast<const std::byte*>(data), made);
  return made;
}

std::size_t RegistrationCache::in_use() const {
  std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const auto& entry : entries_) count += !entry.second.expired();
  return count;
}

}  // namespace weft::transport::verbs
