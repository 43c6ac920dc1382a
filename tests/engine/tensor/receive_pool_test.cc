// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <weft/engine/tensor/receive_pool.h>

namespace weft {
namespace {

constexpr std::size_t kMiB = 1 << 20;

TEST(ReceivePool, GivesTheSameMemoryAgain) {
  const auto pool = std::make_shared<ReceivePool>();
  void* first = nullptr;
  {
    const c10::DataPtr block = pool->allocate(3 * kMiB);
    first = block.get();
    std::memset(block.get(), 1, 3 * kMiB);
    EXPECT_EQ(pool->idle_bytes(), 0U);
  }
  EXPECT_EQ(pool->idle_bytes(), 3 * kMiB);
  const c10::DataPtr again = pool->allocate(3 * kMiB - 5);
  EXPECT_EQ(again.get(), first);
  EXPECT_EQ(pool->idle_bytes(), 0U);
}

TEST(ReceivePool, GivesNoMemoryTwice) {
  const auto pool = std::make_shared<ReceivePool>();
  const c10::DataPtr one = pool->allocate(kMiB);
  const c10::DataPtr other = pool->allocate(kMiB);
  EXPECT_NE(one.get(), other.get());
}

TEST(ReceivePool, EverySizeFits) {
  const auto pool = std::make_shared<ReceivePool>();
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{4097}, ReceivePool::kPooledBytes - 1,
        ReceivePool::kPooledBytes, ReceivePool::kPooledBytes + 1, 5 * kMiB + 1, 7 * kMiB}) {
    const c10::DataPtr block = pool->allocate(bytes);
    if (bytes > 0) std::memset(block.get(), 1, bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.get()) % 64, 0U) << bytes;
  }
  EXPECT_THROW(pool->allocate(~std::size_t{0} / 2), std::bad_alloc);
}

TEST(ReceivePool, KeepsNoMoreThanItsLimit) {
  const auto pool = std::make_shared<ReceivePool>(4 * kMiB);
  {
    std::vector<c10::DataPtr> blocks;
    for (int i = 0; i < 6; ++i) blocks.push_back(pool->allocate(kMiB));
    const c10::DataPtr large = pool->allocate(8 * kMiB);
  }
  EXPECT_EQ(pool->idle_bytes(), 4 * kMiB);
  { const c10::DataPtr other = pool->allocate(3 * kMiB); }  // evicts three of the old blocks
  EXPECT_EQ(pool->idle_bytes(), 4 * kMiB);
}

TEST(ReceivePool, UnusedBlocksDoNotRaiseThePeak) {
  const auto pool = std::make_shared<ReceivePool>(16 * kMiB, ReceivePool::Total::AsMuchAsWasUsed);
  {
    const c10::DataPtr one = pool->allocate(2 * kMiB);
    const c10::DataPtr other = pool->allocate(2 * kMiB);
  }
  EXPECT_EQ(pool->idle_bytes(), 4 * kMiB) << "as much as was used at one time";
  {
    const c10::DataPtr larger = pool->allocate(3 * kMiB);  // takes the room of both
    EXPECT_EQ(pool->idle_bytes(), 0U);
  }
  EXPECT_EQ(pool->idle_bytes(), 3 * kMiB);
  {
    std::vector<c10::DataPtr> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(pool->allocate(kMiB));
  }
  EXPECT_EQ(pool->idle_bytes(), 16 * kMiB) << "within the limit of unused blocks";
}

TEST(ReceivePool, BlocksMayOutliveIt) {
  auto pool = std::make_shared<ReceivePool>();
  c10::DataPtr block = pool->allocate(kMiB);
  pool.reset();
  std::memset(block.get(), 1, kMiB);
  block.clear();
}

TEST(ReceivePool, ManyThreadsTakeAndGiveBack) {
  const auto pool = std::make_shared<ReceivePool>(2 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 200; ++i) {
        const c10::DataPtr block = pool->allocate(static_cast<std::size_t>(1 + i % 3) * kMiB / 2);
        auto* const bytes = static_cast<unsigned char*>(block.get());
        bytes[0] = static_cast<unsigned char>(t);
        std::this_thread::yield();
        ASSERT_EQ(bytes[0], t);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(pool->idle_bytes(), 2 * kMiB);
}

}  // namespace
}  // namespace weft
