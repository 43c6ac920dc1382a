// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <weft/base/mutex.h>
#include <weft/transport/inproc/regions.h>

namespace weft::transport::inproc {

std::shared_ptr<MemoryRegion> Regions::add(const Slice& memory) {
  MutexLock lock(mutex_);
  const std::uint64_t token = ++last_;
  regions_.emplace(token, memory);
  const Pin registration(&regions_, [self = shared_from_this(), token](const void*) {
    MutexLock again(self->mutex_);
    self->regions_.erase(token);
  });
  return std::make_shared<MemoryRegion>(memory, RegionKey{0, memory.bytes, token}, registration);
}

bool Regions::write(const RegionKey& key, std::uint64_t offset, std::span<const std::byte> bytes) {
  MutexLock lock(mutex_);
  const auto found = regions_.find(key.token);
  if (found == regions_.end() || offset > found->second.bytes ||
      bytes.size() > found->second.bytes - offset)
    return false;
  std::memcpy(static_cast<std::byte*>(found->second.data) + offset, bytes.data(), bytes.size());
  return true;
}

}  // namespace weft::transport::inproc
