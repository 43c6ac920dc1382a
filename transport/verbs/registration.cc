// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

namespace {

int flags_of(Access access) {
  switch (access) {
    case Access::Read: return 0;
    case Access::Receive: return IBV_ACCESS_LOCAL_WRITE;
    default: return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  }
}

}  // namespace

Registration::Registration(std::shared_ptr<Device> device, const Slice& memory, Access access)
    : device_(std::move(device)), memory_(memory), access_(access) {
  const std::string what = device_->name() + ": " + std::to_string(memory.bytes) + " bytes of " +
                           describe(memory.device) + " cannot be registered";
  if (!memory.device.is_host())
    throw Error(Blame::Unsupported, what + ": verbs moves host memory only; stage it");
  region_ =
      device_->library().reg_mr(device_->domain(), memory.data, memory.bytes, flags_of(access));
  if (region_ != nullptr) return;
  const int number = errno;
  if (number == EFAULT) {
    throw system_error(
        Blame::Caller,
        what + (access == Access::Read
                    ? " (it is not mapped, or the kernel does not let devices access this file "
                      "mapping: copy it first)"
                    : " (it is not mapped, or it is read-only: use writable memory)"),
        number);
  }
  const bool is_locking = number == ENOMEM || number == EPERM;
  throw system_error(
      Blame::Busy,
      what + (is_locking ? " (raise the limit of locked memory: ulimit -l unlimited)" : ""),
      number);
}

Registration::Registration(std::shared_ptr<Device> device, const Slice& memory, ibv_mr* region,
                           std::weak_ptr<cuda::Device> gpu)
    : device_(std::move(device)),
      memory_(memory),
      access_(Access::RemoteWrite),
      gpu_(std::move(gpu)),
      region_(region) {}

Registration::~Registration() {
  device_->has_ended(
      device_->library().dereg_mr(region_),
      "memory cannot be deregistered; a peer that has its key may still write to it");
}

bool Registration::covers(const void* data, std::size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(memory_.data);
  const auto* const first = static_cast<const std::byte*>(data);
  return first >= begin && bytes <= memory_.bytes &&
         static_cast<std::size_t>(first - begin) <= memory_.bytes - bytes;
}

std::shared_ptr<const Registration> RegistrationCache::find(const void* data, std::size_t bytes,
                                                            Access access) const {
  const auto fits = [&](const Registration& one) {
    const bool is_larger = one.memory().data != data || one.memory().bytes != bytes;
    return one.access() == access && one.covers(data, bytes) &&
           !(is_larger && access == Access::RemoteWrite);
  };
  for (auto entry = entries_.upper_bound(static_cast<const std::byte*>(data));
       entry != entries_.begin();) {
    --entry;
    const auto registration = entry->second.lock();
    if (registration && fits(*registration)) return registration;
  }
  return nullptr;
}

std::shared_ptr<const Registration> RegistrationCache::of(const void* data, std::size_t bytes,
                                                          Access access) {
  if (auto of_gpu = gpus_.at(data, bytes)) return of_gpu;
  {
    MutexLock lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    if (auto found = find(data, bytes, access)) return found;
  }
  const Slice memory{const_cast<void*>(data), bytes, weft::Device::host()};
  auto made = std::make_shared<const Registration>(device_, memory, access);
  MutexLock lock(mutex_);
  entries_.emplace(static_cast<const std::byte*>(data), made);
  return made;
}

std::size_t RegistrationCache::in_use() const {
  MutexLock lock(mutex_);
  std::size_t count = 0;
  for (const auto& entry : entries_) count += !entry.second.expired();
  return count;
}

}  // namespace weft::transport::verbs
