// Memory that a device may read and write. A registration is an object: destroying it deregisters, and once that has
// returned the device touches the memory no more.
//
// Registering pins pages and takes 10 µs and more, so what is in use already is not registered again: a part of a range
// that somebody else holds a registration of shares it. Nothing is kept beyond its last user, as nobody tells when memory
// is given back to the system: an address that was mapped anew would still lead to the old pages.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include <weft/base/slice.h>
#include <weft/transport/verbs/device.h>

namespace weft::transport::verbs {

class Registration {
 public:
  // Throws Busy, saying how to allow more locked memory where that is the cause; Unsupported for memory of a GPU.
  Registration(std::shared_ptr<Device> device, const Slice& memory);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const Slice& memory() const { return memory_; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }
  bool covers(const Slice& part) const;

 private:
  const std::shared_ptr<Device> device_;
  const Slice memory_;
  ibv_mr* region_ = nullptr;
};

// The registrations of one device that are in use. Usable from every thread.
class RegistrationCache {
 public:
  explicit RegistrationCache(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // One that covers the memory. Throws as Registration's constructor.
  std::shared_ptr<const Registration> of(const Slice& memory);
  std::size_t in_use() const;

 private:
  using Entries = std::multimap<const std::byte*, std::weak_ptr<const Registration>>;
  std::shared_ptr<const Registration> find(const Slice& memory) const;

  const std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  Entries entries_;  // by address
};

}  // namespace weft::transport::verbs
