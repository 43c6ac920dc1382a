// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <new>

#include <sys/mman.h>

#include <c10/core/CPUAllocator.h>

#include <weft/engine/tensor/receive_pool.h>

namespace weft {

namespace {

// Rounds up to a block size. There are four sizes for each doubling, so at most a fourth is wasted.
std::size_t size_of_block(std::size_t bytes) {
  const std::size_t step = std::max<std::size_t>(std::bit_floor(bytes) / 4, 1);
  const std::size_t rounded = (bytes + step - 1) / step * step;
  if (rounded < bytes) throw std::bad_alloc();
  return rounded;
}

void* map(std::size_t bytes) {
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  ::madvise(data, bytes, MADV_HUGEPAGE);  // without huge pages, small pages serve
  return data;
}

}  // namespace

struct ReceivePool::Block {
  std::shared_ptr<ReceivePool> pool;
  void* data;
  std::size_t bytes;

  static void free(void* block) {
    const std::unique_ptr<Block> freed(static_cast<Block*>(block));
    freed->pool->give_back(freed->data, freed->bytes);
  }
};

ReceivePool::~ReceivePool() {
  for (const auto& [bytes, blocks] : idle_) {
    for (const Idle& block : blocks) ::munmap(block.data, bytes);
  }
}

c10::DataPtr ReceivePool::allocate(std::size_t bytes) {
  if (bytes < kPooledBytes) return c10::GetCPUAllocator()->allocate(bytes);
  const std::size_t size = size_of_block(bytes);
  auto block = std::make_unique<Block>(Block{shared_from_this(), nullptr, size});
  {
    MutexLock lock(mutex_);
    if (const auto found = idle_.find(size); found != idle_.end()) {
      block->data = found->second.back().data;  // the most recently used block
      found->second.pop_back();
      if (found->second.empty()) idle_.erase(found);
      idle_bytes_ -= size;
    }
    used_bytes_ += size;
    most_used_ = std::max(most_used_, used_bytes_);
    while (block->data == nullptr && has_too_much()) drop_oldest();
  }
  if (block->data == nullptr) {
    try {
      block->data = map(size);
    } catch (...) {
      MutexLock lock(mutex_);
      used_bytes_ -= size;
      throw;
    }
  }
  void* const data = block->data;
  return {data, block.release(), &Block::free, c10::Device(c10::kCPU)};
}

void ReceivePool::give_back(void* data, std::size_t bytes) noexcept {
  MutexLock lock(mutex_);
  used_bytes_ -= bytes;
  if (bytes > most_idle_) {
    ::munmap(data, bytes);
    return;
  }
  idle_[bytes].push_back({data, stamps_++});
  idle_bytes_ += bytes;
  while (has_too_much()) drop_oldest();
}

bool ReceivePool::has_too_much() const {
  if (idle_bytes_ > most_idle_) return true;
  return total_ == Total::AsMuchAsWasUsed && idle_bytes_ > 0 &&
         used_bytes_ + idle_bytes_ > most_used_;
}

void ReceivePool::drop_oldest() {
  auto oldest = idle_.begin();
  for (auto size = idle_.begin(); size != idle_.end(); ++size) {
    if (size->second.front().stamp < oldest->second.front().stamp) oldest = size;
  }
  ::munmap(oldest->second.front().data, oldest->first);
  idle_bytes_ -= oldest->first;
  oldest->second.pop_front();
  if (oldest->second.empty()) idle_.erase(oldest);
}

std::size_t ReceivePool::idle_bytes() const {
  MutexLock lock(mutex_);
  return idle_bytes_;
}

}  // namespace weft
