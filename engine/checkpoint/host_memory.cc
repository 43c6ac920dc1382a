// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/host_memory.h>

namespace weft::checkpoint {

namespace {

// All KeptBytes of this process.
class Registry {
 public:
  void add(const std::shared_ptr<KeptBytes>& one) {
    MutexLock lock(mutex_);
    std::erase_if(all_, [](const auto& other) { return other.expired(); });
    all_.push_back(one);
  }
  std::vector<std::weak_ptr<KeptBytes>> all() {
    MutexLock lock(mutex_);
    return all_;
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<KeptBytes>> all_ WEFT_GUARDED_BY(mutex_);
};

Registry& registry() {
  static auto* const all = new Registry();  // threads may end after static objects are destroyed
  return *all;
}

// Smaller tensors come from libtorch's allocator.
constexpr std::int64_t kPaged = std::int64_t{1} << 20;

struct Mapping {
  char* data;
  std::size_t bytes;

  static void free(void* mapping) {
    const std::unique_ptr<Mapping> freed(static_cast<Mapping*>(mapping));
    ::munmap(freed->data, freed->bytes);
  }
};

Mapping map(std::size_t bytes) {
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw system_error(Blame::Busy, "no " + std::to_string(bytes) + " bytes of memory", errno);
  return {static_cast<char*>(data), bytes};
}

// Each block is a mapping of its own. Storages refer to the allocator, so that they can be resized.
class PagedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto mapping = std::make_unique<Mapping>();
    *mapping = map(bytes);
    char* const data = mapping->data;
    return {data, mapping.release(), &Mapping::free, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

at::Tensor tensor_of(at::IntArrayRef sizes, c10::ScalarType dtype) {
  static PagedAllocator* const allocator = new PagedAllocator();  // tensors may outlive static ones
  return at::detail::empty_generic(sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

}  // namespace

at::Tensor paged_bytes(std::uint64_t bytes) {
  return tensor_of({static_cast<std::int64_t>(bytes)}, at::kByte);
}

at::Tensor paged_tensor(at::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto bytes =
      c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes < kPaged ? at::empty(sizes, at::TensorOptions(dtype)) : tensor_of(sizes, dtype);
}

std::shared_ptr<KeptBytes> KeptBytes::make() {
  auto made = std::make_shared<KeptBytes>();
  registry().add(made);
  return made;
}

void KeptBytes::keep(at::Tensor memory) {
  if (memory.is_pinned()) return;
  MutexLock lock(mutex_);
  memory_ = std::move(memory);
}

at::Tensor KeptBytes::take_if(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  const std::uint64_t most = bytes + bytes / 8;
  if (!memory_.defined() || memory_.nbytes() < bytes || memory_.nbytes() > most) return {};
  return std::exchange(memory_, {});
}

at::Tensor KeptBytes::take(std::uint64_t bytes) {
  for (const auto& one : registry().all()) {
    const auto kept = one.lock();
    at::Tensor memory = kept ? kept->take_if(bytes) : at::Tensor();
    if (memory.defined()) return memory;
  }
  return {};
}

}  // namespace weft::checkpoint
