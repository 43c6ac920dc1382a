// SPDX-License-Identifier: Apache-2.0
// A pool of buffers for parts in transit. Buffers are reused, because the first touch of fresh
// pages costs more than the copy into them. Used by one thread at a time.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace weft::transport::mesh {

class Scratch {
 public:
  // Aligned for every element type. Shared, because a connection that still writes into a block
  // keeps it alive.
  using Block = std::shared_ptr<std::byte>;

  // Returns at least this many bytes, uninitialized.
  Block take(std::size_t bytes) {
    auto& free = free_[class_of(bytes)];
    if (free.empty()) return fresh(kSmallest << class_of(bytes));
    Block block = std::move(free.back());
    free.pop_back();
    return block;
  }
  // Returns a block to the pool; `bytes` is the size with which it was taken. A block that is still
  // used elsewhere is not pooled.
  void give(Block block, std::size_t bytes) {
    auto& free = free_[class_of(bytes)];
    if (block.use_count() == 1 && free.size() < kept(bytes)) free.push_back(std::move(block));
  }

 private:
  static constexpr std::size_t kSmallest = 4096;
  static constexpr std::align_val_t kAlignment{64};
  // How many free blocks of this size the pool keeps: many of a chunk's size, few large ones.
  static constexpr std::size_t kept(std::size_t bytes) {
    return bytes <= 1 << 20 ? 16 : bytes <= 32 << 20 ? 1 : 0;
  }

  static std::size_t class_of(std::size_t bytes) {
    return bytes <= kSmallest ? 0
                              : static_cast<std::size_t>(std::bit_width((bytes - 1) / kSmallest));
  }
  static Block fresh(std::size_t bytes) {
    return Block(static_cast<std::byte*>(::operator new(bytes, kAlignment)),
                 [](std::byte* memory) { ::operator delete(memory, kAlignment); });
  }
  std::array<std::vector<Block>, 52> free_;  // of kSmallest << index bytes
};

}  // namespace weft::transport::mesh
