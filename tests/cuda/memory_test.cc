// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>

#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Memory : public FakeCuda {
 protected:
  explicit Memory(harness::FakeDriver::Options options = {}) : FakeCuda(options) {}
  Stream stream{*device};
};

TEST_F(Memory, AllocatesAndFreesInStreamOrder) {
  {
    DeviceMemory memory(stream, 64);
    EXPECT_EQ(memory.slice().bytes, 64u);
    EXPECT_EQ(memory.slice().device, weft::Device::cuda(0));
    fill(stream, memory.slice(), 1);
  }
  EXPECT_EQ(fake.host_blocks(), 0);
  EXPECT_EQ(fake.alive().device_allocations, 1u) << "the stream has not reached the free";
  fake.run();
  EXPECT_THAT(fake.executed(), ElementsAre("cuMemAllocAsync", "cuMemsetD8Async", "cuMemFreeAsync"));
  EXPECT_EQ(fake.alive().device_allocations, 0u);
}

TEST_F(Memory, IsFreedOnItsLastStream) {
  Stream last(*device);
  {
    DeviceMemory memory(stream, 64);
    const Fence ready = record(stream);
    ready.wait(last);
    fill(last, memory.slice(), 1);
    memory.set_stream(last);
  }
  fake.run();
  EXPECT_THAT(fake.executed(last),
              ElementsAre("cuStreamWaitEvent", "cuMemsetD8Async", "cuMemFreeAsync"));
}

TEST_F(Memory, ZeroBytesNeedNoDriverCall) {
  DeviceMemory memory(stream, 0);
  EXPECT_FALSE(memory);
  EXPECT_EQ(memory.slice().bytes, 0u);
  copy(stream, memory.slice(), memory.slice());
  fill(stream, memory.slice(), 0);
  EXPECT_EQ(fake.pending(), 0u);
}

TEST_F(Memory, MoveKeepsOneOwner) {
  DeviceMemory first(stream, 64);
  DeviceMemory second = std::move(first);
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move)
  first = DeviceMemory(stream, 32);
  first = std::move(second);
  EXPECT_EQ(first.slice().bytes, 64u);
  fake.run();
  EXPECT_EQ(fake.alive().device_allocations, 1u);
}

TEST_F(Memory, OutlivesItsPool) {
  auto pool = std::make_unique<MemoryPool>(*device);
  const DeviceMemory memory(stream, 64, *pool);
  pool.reset();
  EXPECT_EQ(fake.calls(&Driver::mem_alloc_from_pool_async), 1);
  fill(stream, memory.slice(), 5);
  fake.run();
  EXPECT_EQ(*static_cast<const unsigned char*>(memory.slice().data), 5);
}

TEST_F(Memory, FailedSetupDestroysThePool) {
  fake.fail(&Driver::mem_pool_set_attribute, CUDA_ERROR_INVALID_VALUE, 2);
  EXPECT_THROW(MemoryPool(*device).native(), Error);
  EXPECT_EQ(fake.alive().pools, 0u);
}

class SmallMemory : public Memory {
 protected:
  SmallMemory() : Memory({.device_bytes = 1000}) {}
};

TEST_F(SmallMemory, FullIsBusyAndNamesTheBytes) {
  const DeviceMemory memory(stream, 800);
  const Error error = error_from([&] { DeviceMemory(stream, 300); });
  EXPECT_EQ(error.blame(), Blame::Busy);
  EXPECT_THAT(error.text(), HasSubstr("allocating 300 bytes on cuda:0: CUDA_ERROR_OUT_OF_MEMORY"));
}

TEST_F(Memory, CopiesBetweenHostAndDevice) {
  PinnedPool pool(*device);
  const PinnedMemory in = pool.allocate(16);
  const PinnedMemory out = pool.allocate(16);
  const DeviceMemory a(stream, 16);
  const DeviceMemory b(stream, 16);
  std::memcpy(in.slice().data, "fifteen letters", 16);
  const int blocks = fake.host_blocks();
  copy(stream, a.slice(), in.slice());
  copy(stream, b.slice(), a.slice());
  copy(stream, out.slice(), b.slice());
  EXPECT_STRNE(static_cast<const char*>(out.slice().data), "fifteen letters");
  fake.run();
  EXPECT_STREQ(static_cast<const char*>(out.slice().data), "fifteen letters");
  EXPECT_EQ(fake.host_blocks(), blocks);
}

TEST_F(Memory, PageableCopiesAreRefused) {
  std::array<char, 16> pageable{};
  const Slice host{pageable.data(), pageable.size(), weft::Device::host()};
  const DeviceMemory memory(stream, 16);
  for (const Error& error : {error_from([&] { copy(stream, memory.slice(), host); }),
                             error_from([&] { copy(stream, host, memory.slice()); })}) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("pageable"), HasSubstr("cuda::PinnedPool")));
  }
  EXPECT_EQ(error_from([&] { fill(stream, host, 0); }).blame(), Blame::Caller);
  EXPECT_EQ(fake.calls(&Driver::memcpy_async) + fake.host_blocks(), 0);
}

TEST_F(Memory, UnequalCopiesAreRefused) {
  const DeviceMemory a(stream, 16);
  const DeviceMemory b(stream, 8);
  const Error error = error_from([&] { copy(stream, a.slice(), b.slice()); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(),
              AllOf(HasSubstr("(16 bytes)"), HasSubstr("(8 bytes)"), HasSubstr("cuda:0")));
}

class MemoryOfTwo : public Memory {
 protected:
  MemoryOfTwo() : Memory({.devices = 2}) {}
  std::shared_ptr<Device> other = Device::open(fake.driver(), 1);
};

TEST_F(MemoryOfTwo, StaysOnItsDevice) {
  Stream there(*other);
  DeviceMemory memory(stream, 16);
  MemoryPool pool(*device);
  EXPECT_EQ(error_from([&] { memory.set_stream(there); }).blame(), Blame::Caller);
  EXPECT_EQ(error_from([&] { DeviceMemory(there, 16, pool); }).blame(), Blame::Caller);
}

TEST_F(MemoryOfTwo, IsCopiedBetweenDevices) {
  Stream there(*other);
  DeviceMemory from(stream, 16);
  DeviceMemory to(there, 16);
  fill(stream, from.slice(), 6);
  record(stream).wait(there);
  copy(there, to.slice(), from.slice());
  fake.run();
  EXPECT_EQ(*static_cast<const unsigned char*>(to.slice().data), 6);
}

class NoPools : public Memory {
 protected:
  NoPools() : Memory({.memory_pools = false}) {}
};

TEST_F(NoPools, UnsupportedErrorNamesTheGpu) {
  const Error error = error_from([&] { MemoryPool pool(*device); });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("cuda:0 (fake GPU) has no memory pools"));
}

}  // namespace
}  // namespace weft::cuda
