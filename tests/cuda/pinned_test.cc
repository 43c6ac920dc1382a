// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include <weft/cuda/pinned.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using Pinned = FakeCuda;

TEST_F(Pinned, BlocksHaveTheirSizeAndAnAddress) {
  PinnedPool pool(*device);
  const PinnedMemory block = pool.allocate(1000);
  EXPECT_EQ(block.slice().bytes, 1000u);
  EXPECT_EQ(block.slice().device, weft::Device::host());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.slice().data) % 64, 0u);
  EXPECT_NE(block.address(), 0u);
  std::memset(block.slice().data, 1, 1000);
}

TEST_F(Pinned, BlocksDoNotOverlap) {
  PinnedPool pool(*device, 1 << 16);
  std::vector<PinnedMemory> blocks;
  for (std::size_t bytes : {1, 256, 257, 4000, 4096, 20000, 70000, 100000, 3, 16384})
    blocks.push_back(pool.allocate(bytes));
  for (int i = 0; i < 20; ++i)
    blocks.push_back(pool.allocate(10'000));  // more than fit into one slab
  unsigned char mark = 0;
  for (const auto& block : blocks) std::memset(block.slice().data, ++mark, block.slice().bytes);
  mark = 0;
  for (const auto& block : blocks) {
    ++mark;
    const auto* bytes = static_cast<const unsigned char*>(block.slice().data);
    for (std::size_t i = 0; i < block.slice().bytes; ++i) ASSERT_EQ(bytes[i], mark);
  }
}

TEST_F(Pinned, ReusedBlocksNeedNoDriverCall) {
  PinnedPool pool(*device);
  void* first = nullptr;
  {
    const PinnedMemory block = pool.allocate(5000);
    first = block.slice().data;
  }
  const PinnedMemory again = pool.allocate(4900);
  EXPECT_EQ(again.slice().data, first) << "blocks of one size class are reused";
  EXPECT_EQ(fake.calls(&Driver::mem_host_alloc), 1);
}

TEST_F(Pinned, UsageCountsSlabsAndBlocks) {
  PinnedPool pool(*device, 1 << 16);
  EXPECT_EQ(pool.usage().pinned_bytes, 0u) << "nothing is pinned before it is needed";
  {
    const PinnedMemory small = pool.allocate(300);
    const PinnedMemory large = pool.allocate(1 << 20);
    EXPECT_EQ(pool.usage().pinned_bytes, (1u << 16) + (1u << 20))
        << "a large block has its own slab";
    EXPECT_EQ(pool.usage().used_bytes, 320u + (1u << 20));
  }
  EXPECT_EQ(pool.usage().used_bytes, 0u);
  EXPECT_EQ(pool.usage().pinned_bytes, (1u << 16) + (1u << 20)) << "slabs are kept";
}

TEST_F(Pinned, LargeBlocksWasteAtMostAFifth) {
  PinnedPool pool(*device);
  for (std::size_t bytes = 256; bytes < 200'000; bytes += 997) {
    const PinnedMemory block = pool.allocate(bytes);
    const std::size_t room = pool.usage().used_bytes;
    ASSERT_GE(room, bytes);
    ASSERT_LE(room - bytes, room / 5 + 1) << bytes;
  }
}

TEST_F(Pinned, LastBlockRetiresTheSlab) {
  auto pool = std::make_unique<PinnedPool>(*device);
  auto block = std::make_unique<PinnedMemory>(pool->allocate(100));
  pool.reset();
  EXPECT_EQ(device->retirement().pending(), 0u) << "a block still lives in the slab";
  block.reset();
  EXPECT_EQ(device->retirement().pending(), 1u);
  EXPECT_EQ(fake.calls(&Driver::mem_free_host), 0)
      << "freeing waits for the device, so a destructor must not do it";
  device->retirement().reclaim();
  EXPECT_EQ(fake.calls(&Driver::mem_free_host), 1);
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
}

TEST_F(Pinned, FullHostMemoryIsBusy) {
  PinnedPool pool(*device);
  fake.fail(&Driver::mem_host_alloc, CUDA_ERROR_OUT_OF_MEMORY);
  const Error error = error_from([&] { pool.allocate(100); });
  EXPECT_EQ(error.blame(), Blame::Busy);
  EXPECT_THAT(error.text(), testing::HasSubstr("8388608 bytes"));
  EXPECT_EQ(pool.usage().used_bytes, 0u);
  const PinnedMemory later = pool.allocate(100);
  EXPECT_TRUE(later.slice().data);
}

TEST_F(Pinned, UnmappableSlabIsFreed) {
  PinnedPool pool(*device);
  fake.fail(&Driver::mem_host_get_device_pointer, CUDA_ERROR_INVALID_VALUE);
  EXPECT_THROW(pool.allocate(100), Error);
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
}

TEST_F(Pinned, MoveKeepsOneOwner) {
  PinnedPool pool(*device);
  PinnedMemory first = pool.allocate(100);
  PinnedMemory second = std::move(first);
  first = pool.allocate(100);
  EXPECT_NE(first.slice().data, second.slice().data);
  first = std::move(second);
  EXPECT_EQ(pool.usage().used_bytes, 256u);
}

}  // namespace
}  // namespace weft::cuda
