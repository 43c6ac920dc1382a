// The memory that one end of a lane lets the other write into. Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>

#include <weft/transport/memory_region.h>

namespace weft::transport::inproc {

class Regions : public std::enable_shared_from_this<Regions> {
 public:
  std::shared_ptr<MemoryRegion> add(const Slice& memory);
  // False where there is no such region, or it is smaller.
  bool write(const RegionKey& key, std::uint64_t offset, std::span<const std::byte> bytes);

 private:
  std::mutex mutex_;                        // of what follows, and of writing
  std::map<std::uint64_t, Slice> regions_;  // by token
  std::uint64_t last_ = 0;                  // never given twice
};

}  // namespace weft::transport::inproc
