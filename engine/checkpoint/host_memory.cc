// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

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

}  // namespace

at::Tensor paged_bytes(std::uint64_t bytes) {
  const at::TensorOptions options(at::kByte);
  if (bytes == 0) return at::empty({0}, options);
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw system_error(Blame::Busy, "no " + std::to_string(bytes) + " bytes of memory", errno);
  return at::from_blob(
      data, {static_cast<std::int64_t>(bytes)}, [bytes](void* mapped) { ::munmap(mapped, bytes); },
      options);
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
