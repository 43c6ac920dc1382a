// SPDX-License-Identifier: Apache-2.0
// The memory that one end of a connection lets the other end write into. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <span>

#include <weft/base/mutex.h>
#include <weft/transport/memory_region.h>

namespace weft::transport::inproc {

class Regions : public std::enable_shared_from_this<Regions> {
 public:
  std::shared_ptr<MemoryRegion> add(const Slice& memory);
  // Returns false if there is no such region, or if it is too small.
  bool write(const RegionKey& key, std::uint64_t offset, std::span<const std::byte> bytes);

 private:
  Mutex mutex_;  // also held while memory is written
  std::map<std::uint64_t, Slice> regions_ WEFT_GUARDED_BY(mutex_);  // by token
  std::uint64_t last_ WEFT_GUARDED_BY(mutex_) = 0;                  // tokens are never reused
};

}  // namespace weft::transport::inproc
