// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <span>
#include <thread>

#include <gmock/gmock.h>
#include <unistd.h>

#include <weft/base/op.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/library.h>
#include <weft/cuda/rdma.h>
#include <weft/cuda/stream_memops.h>
#include <weft/tests/cuda/driver_claims.h>
#include <weft/tests/cuda/virtual_memory.h>

namespace weft::cuda {
namespace {

using std::chrono::milliseconds;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// Sets to[i] = value for i < count. The PTX version is so old that every driver that Weft accepts
// compiles it for its GPU.
constexpr char kFillPtx[] = R"(.version 7.8
.target sm_80
.address_size 64
.visible .entry fill_words(.param .u64 fill_words_0, .param .u32 fill_words_1, .param .u32 fill_words_2)
{
  .reg .pred %p<2>;
  .reg .b32 %r<7>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [fill_words_0];
  ld.param.u32 %r1, [fill_words_1];
  ld.param.u32 %r2, [fill_words_2];
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %ctaid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r6, %r4, %r3, %r5;
  setp.ge.u32 %p1, %r6, %r2;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r6, 4;
  add.u64 %rd4, %rd2, %rd3;
  st.global.u32 [%rd4], %r1;
DONE:
  ret;
}
)";

TEST_P(DriverClaims, FillsTheTableAndTheProperties) {
  EXPECT_FALSE(device->properties().name.empty());
  EXPECT_GE(device->properties().compute_capability, 70);
  EXPECT_GT(device->properties().multiprocessors, 0);
  EXPECT_TRUE(device->properties().memory_pools);
  EXPECT_LE(device->properties().greatest_priority, device->properties().least_priority);
  EXPECT_TRUE(device->probe());
}

TEST_P(DriverClaims, ErrorsCarryTheDriversNames) {
  const Error error = error_of(*driver, CUDA_ERROR_OUT_OF_MEMORY, "cuSomething");
  EXPECT_EQ(error.text(), "cuSomething: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_EQ(error.blame(), Blame::Busy);
}

TEST_P(DriverClaims, GuardRestoresTheContext) {
  CUcontext current = nullptr;
  ASSERT_EQ(driver->ctx_set_current(nullptr), CUDA_SUCCESS);
  {
    DeviceGuard guard(*device);
    driver->ctx_get_current(&current);
    EXPECT_EQ(current, device->context());
  }
  driver->ctx_get_current(&current);
  EXPECT_EQ(current, nullptr);
}

TEST_P(DriverClaims, FencePassesOnlyAfterRecordedWork) {
  Stream stream(*device, Priority::High);
  const auto closed = gate(stream);
  const Fence done = record(stream);
  EXPECT_FALSE(done.query());
  EXPECT_FALSE(stream.query());
  EXPECT_FALSE(done.synchronize(Deadline::in(milliseconds(5))));
  closed->raise();
  EXPECT_TRUE(done.synchronize(soon()));
  EXPECT_TRUE(done.query());
}

TEST_P(DriverClaims, StreamReadsOnlyAfterTheFence) {
  Stream producer(*device);
  Stream consumer(*device);
  const DeviceMemory memory(producer, kBytes);
  fill(producer, memory.slice(), 0);
  ASSERT_TRUE(record(producer).synchronize(soon()));
  const auto closed = gate(producer);
  fill(producer, memory.slice(), 0x11);
  const Fence ready = record(producer);
  ready.wait(consumer);
  copy(consumer, host.slice(), memory.slice());
  const Fence arrived = record(consumer);
  EXPECT_FALSE(arrived.synchronize(Deadline::in(milliseconds(5))));
  closed->raise();
  ASSERT_TRUE(arrived.synchronize(soon()));
  EXPECT_THAT(words(), Each(0x11111111u));
}

TEST_P(DriverClaims, ReusedEventStillHoldsBackWaiters) {
  Stream producer(*device);
  Stream consumer(*device);
  Stream elsewhere(*device);
  const auto closed = gate(producer);
  const std::size_t idle = device->events().idle();
  record(producer).wait(consumer);  // the fence is gone, its event is free again
  ASSERT_EQ(device->events().idle(), idle);
  const Fence reuse = record(elsewhere);
  ASSERT_EQ(device->events().idle(), idle - 1) << "the same event, recorded anew";
  EXPECT_TRUE(reuse.synchronize(soon()));
  const Fence after = record(consumer);
  EXPECT_FALSE(after.synchronize(Deadline::in(milliseconds(5))));
  closed->raise();
  EXPECT_TRUE(after.synchronize(soon()));
}

TEST_P(DriverClaims, LegacyDefaultStreamCanBeViewed) {
  const StreamRef legacy(*device, nullptr);
  const auto closed = gate(legacy);
  const Fence done = record(legacy);
  EXPECT_FALSE(done.query());
  closed->raise();
  EXPECT_TRUE(done.synchronize(soon()));
}

TEST_P(DriverClaims, HostFlagReleasesAllWaitingStreams) {
  std::vector<Stream> streams;
  for (int i = 0; i < 4; ++i) streams.emplace_back(*device);
  const auto flag = flags->make();
  std::vector<Fence> passed;
  for (const Stream& stream : streams) {
    Fence(flag).wait(stream);
    passed.push_back(record(stream));
  }
  for (const Fence& fence : passed) EXPECT_FALSE(fence.query());
  flag->raise();
  for (const Fence& fence : passed) EXPECT_TRUE(fence.synchronize(soon()));
}

TEST_P(DriverClaims, LateStreamPassesAReusedSlot) {
  Stream late(*device);
  const auto closed = gate(late);
  {
    const auto flag = flags->make();
    flag->wait(late);
    flag->raise();
  }
  // Every slot is taken once more, and none is raised, before the stream comes to its wait.
  std::vector<std::shared_ptr<MappedFlag>> all;
  while (flags->usage().free > 0) all.push_back(flags->make());
  closed->raise();
  EXPECT_TRUE(record(late).synchronize(soon()));
}

TEST_P(DriverClaims, StreamFlagPassesAfterItsWork) {
  Stream stream(*device);
  const DeviceMemory memory(stream, kBytes);
  const auto closed = gate(stream);
  fill(stream, memory.slice(), 0x22);
  copy(stream, host.slice(), memory.slice());
  const Fence done = flags->signal(stream);
  EXPECT_FALSE(done.synchronize(Deadline::in(milliseconds(5))));
  closed->raise();
  ASSERT_TRUE(done.synchronize(soon()));
  EXPECT_THAT(words(), Each(0x22222222u))
      << "the copied bytes are visible when the flag has passed";
}

TEST_P(DriverClaims, FailedOpReleasesTheStream) {
  Stream stream(*device);
  auto flag = flags->make();
  auto memory = std::make_shared<DeviceMemory>(stream, kBytes);
  const std::weak_ptr<DeviceMemory> watch = memory;
  Completion completion{Pin(std::move(memory)), flag};
  const Op op = completion.op();
  op.done().wait(stream);
  const Fence after = record(stream);
  EXPECT_FALSE(after.query());
  EXPECT_FALSE(watch.expired());
  completion.fail(Error(Blame::PeerLost, "rank 1 is lost"));
  EXPECT_TRUE(after.synchronize(soon()));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(op.error()->blame(), Blame::PeerLost);
}

TEST_P(DriverClaims, SplitMemOpBatchRunsInOrder) {
  Stream stream(*device);
  auto* word = static_cast<volatile std::uint32_t*>(host.slice().data);
  MemOpBatch batch;
  for (std::uint32_t i = 1; i <= 300; ++i) {
    batch.write(host.address(), i);
    batch.wait(host.address(), i, Compare::Equal);
  }
  batch.submit(stream);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  EXPECT_EQ(*word, 300u);
}

TEST_P(DriverClaims, DefaultCompareIsCyclic) {
  Stream stream(*device);
  write_value(stream, host.address(), 1);
  wait_value(stream, host.address(), 0xffffffff);
  EXPECT_TRUE(record(stream).synchronize(soon())) << "1 comes after 2^32 - 1";
}

TEST_P(DriverClaims, PoolAllocatesOnABlockedStream) {
  Stream stream(*device);
  MemoryPool memory_pool(*device);
  { const DeviceMemory warm(stream, kBytes, memory_pool); }
  ASSERT_TRUE(record(stream).synchronize(soon()));
  const auto closed = gate(stream);
  {
    const DeviceMemory memory(stream, kBytes, memory_pool);
    fill(stream, memory.slice(), 0x33);
    copy(stream, host.slice(), memory.slice());
  }
  const Fence done = record(stream);
  EXPECT_FALSE(done.query());
  closed->raise();
  ASSERT_TRUE(done.synchronize(soon()));
  EXPECT_THAT(words(), Each(0x33333333u));
}

TEST_P(DriverClaims, DmaBufExportMatchesTheProperties) {
  const ShareableMemory memory(*device, (1 << 20) + 1);
  const auto address = reinterpret_cast<CUdeviceptr>(memory.slice().data);
  std::optional<DmaBuf> exported;
  try {
    exported.emplace(*device, address, memory.slice().bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Unsupported) << error.what();
  }
  EXPECT_EQ(exported.has_value(), device->properties().dma_buf);
  if (exported) {
    EXPECT_GE(exported->descriptor(), 0);
    EXPECT_EQ(exported->offset(), address % static_cast<CUdeviceptr>(::sysconf(_SC_PAGESIZE)));
  }
  if (device->properties().remote_writes != Device::RemoteWrites::Unseen)
    flush_remote_writes(*device);
  EXPECT_TRUE(device->probe());
}

// --- virtual addresses

TEST_P(DriverClaims, EachSegmentIsItsOwnAllocation) {
  const VirtualMemory memory(*device, 3);
  const std::size_t bytes = VirtualMemory::kSegmentBytes;
  for (std::size_t i = 0; i < 3; ++i) {
    const AllocationRange range = allocation_of(*device, memory.address(i) + bytes / 2);
    EXPECT_EQ(range.base, memory.address(i));
    EXPECT_EQ(range.bytes, bytes);
    EXPECT_FALSE(share_memory(*device, memory.address(i)))
        << "only memory of cuMemAlloc has an IPC handle";
  }
  const auto first = PhysicalMemory::at(*device, memory.address(0));
  const auto same = PhysicalMemory::at(*device, memory.address(0) + bytes - 1);
  const auto second = PhysicalMemory::at(*device, memory.address(1));
  ASSERT_TRUE(first && same && second);
  EXPECT_TRUE(*first == *same);
  EXPECT_FALSE(*first == *second);
}

TEST_P(DriverClaims, NewMappingDiffersFromTheOldOne) {
  VirtualMemory memory(*device, 1);
  const auto before = PhysicalMemory::at(*device, memory.address(0));
  memory.unmap(0);
  EXPECT_FALSE(PhysicalMemory::at(*device, memory.address(0)));
  memory.map(0);
  const auto after = PhysicalMemory::at(*device, memory.address(0));
  ASSERT_TRUE(before && after);
  EXPECT_FALSE(*before == *after);
}

TEST_P(DriverClaims, OrdinaryMemoryIsNotMappedMemory) {
  Stream stream(*device);
  const ShareableMemory plain(*device, kBytes);
  const DeviceMemory pooled(stream, kBytes);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  for (const Slice& slice : {plain.slice(), pooled.slice(), host.slice()}) {
    EXPECT_FALSE(PhysicalMemory::at(*device, reinterpret_cast<CUdeviceptr>(slice.data)));
  }
}

TEST_P(DriverClaims, SharedMemoryOutlivesItsMapping) {
  Stream stream(*device);
  auto memory = std::make_unique<VirtualMemory>(*device, 1);
  const Descriptor descriptor = PhysicalMemory::at(*device, memory->address(0))->share();
  ASSERT_TRUE(descriptor);
  const OpenedMemory opened(*device, descriptor, VirtualMemory::kSegmentBytes);
  EXPECT_EQ(opened.bytes(), VirtualMemory::kSegmentBytes);
  EXPECT_NE(opened.base(), memory->address(0));
  fill(stream, memory->segment(0).part(0, kBytes), 0x77);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  memory.reset();
  copy(stream, host.slice(), {reinterpret_cast<void*>(opened.base()), kBytes, device->id()});
  ASSERT_TRUE(record(stream).synchronize(soon()));
  EXPECT_THAT(words(), Each(0x77777777u));
}

TEST_P(DriverClaims, PrivateMemoryAndBadDescriptorsFail) {
  const VirtualMemory own(*device, 1, VirtualMemory::Kind::Private), shared(*device, 1);
  EXPECT_FALSE(PhysicalMemory::at(*device, own.address(0))->share());
  const Descriptor descriptor = PhysicalMemory::at(*device, shared.address(0))->share();
  const Descriptor other(::dup(STDERR_FILENO));
  EXPECT_THROW(OpenedMemory(*device, other, VirtualMemory::kSegmentBytes), Error);
  EXPECT_THROW(OpenedMemory(*device, descriptor, 2 * VirtualMemory::kSegmentBytes), Error)
      << "more bytes than the memory has";
  EXPECT_THROW(OpenedMemory(*device, descriptor, 0), Error);
  EXPECT_TRUE(device->probe());
}

TEST_P(DriverClaims, CopySpansSegments) {
  Stream stream(*device);
  const VirtualMemory memory(*device, 2);
  const Slice across = memory.slice().part(VirtualMemory::kSegmentBytes - kBytes / 2, kBytes);
  fill(stream, across, 0x66);
  copy(stream, host.slice(), across);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  EXPECT_THAT(words(), Each(0x66666666u));
}

TEST_P(DriverClaims, CopyAndWaitMovesTheBytes) {
  Stream stream(*device);
  DeviceMemory memory(stream, kBytes);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  std::vector<std::byte> there(kBytes, std::byte{7}), back(kBytes);
  copy_and_wait(*device, memory.slice().data, there.data(), kBytes);
  copy_and_wait(*device, back.data(), memory.slice().data, kBytes);
  EXPECT_EQ(back, there);
}

TEST_P(DriverClaims, PageableCopyIsRefused) {
  Stream stream(*device);
  const DeviceMemory memory(stream, 16);
  std::array<char, 16> pageable{};
  try {
    copy(stream, memory.slice(), {pageable.data(), pageable.size(), weft::Device::host()});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("pageable"));
  }
}

TEST_P(DriverClaims, PreloadedKernelLaunchDoesNotWait) {
  Stream stream(*device);
  const DeviceMemory memory(stream, kBytes);
  Library library(*device, std::as_bytes(std::span(kFillPtx)));
  library.preload(*device);
  const Kernel fill_words = library.kernel("fill_words");
  EXPECT_THAT(fill_words.parameters(), ElementsAre(8u, 4u, 4u));
  const auto closed = gate(stream);
  launch(stream, fill_words, {kWords / 256}, {256}, 0, memory.slice().data, 0x44u,
         static_cast<std::uint32_t>(kWords));
  copy(stream, host.slice(), memory.slice());
  const Fence done = record(stream);
  EXPECT_FALSE(done.query());
  closed->raise();
  ASSERT_TRUE(done.synchronize(soon()));
  EXPECT_THAT(words(), Each(0x44u));
  EXPECT_THROW(
      launch(stream, fill_words, {1}, {256}, 0, memory.slice().data, 0x44u, std::size_t{1}), Error);
  EXPECT_THROW(library.kernel("no_such_kernel"), Error);
}

TEST_P(DriverClaims, DestructorsDoNotBlock) {
  auto flag = flags->make();
  {
    PinnedPool another(*device);
    const PinnedMemory block = another.allocate(kBytes);
    Stream stream(*device);
    const DeviceMemory memory(stream, kBytes);
    flag->wait(stream);
    const Fence fence = record(stream);
    EXPECT_FALSE(fence.query());
  }
  flag->raise();
}

// --- graphs

TEST_P(DriverClaims, GraphLaunchesKeepTheFencesOrder) {
  Stream stream(*device), other(*device);
  const DeviceMemory memory(stream, kBytes);
  fill(stream, memory.slice(), 0x11);
  ASSERT_TRUE(record(stream).synchronize(soon()));
  ASSERT_EQ(graphs->begin(stream), CUDA_SUCCESS);
  fill(stream, memory.slice(), 0x55);
  const Fence filled = record(stream);
  EXPECT_TRUE(is_captured(filled));
  filled.wait(other);  // `other` becomes a part of the capture
  EXPECT_TRUE(other.is_capturing());
  copy(other, host.slice(), memory.slice());
  const Fence copied = record(other);
  copied.wait(stream);
  fill(stream, memory.slice(), 0x66);
  EXPECT_FALSE(copied.query());
  ASSERT_EQ(graphs->end(stream), CUDA_SUCCESS);
  EXPECT_FALSE(other.is_capturing());
  EXPECT_TRUE(filled.query())
      << "captured work runs only in launches, for which the host does not wait";
  EXPECT_TRUE(copied.query());
  EXPECT_THAT(words(), Each(0u)) << "nothing has run";
  for (int launch = 0; launch < 3; ++launch) {
    std::memset(host.slice().data, 0, kBytes);
    ASSERT_EQ(graphs->launch(stream), CUDA_SUCCESS);
    ASSERT_TRUE(record(stream).synchronize(soon()));
    EXPECT_THAT(words(), Each(0x55555555u)) << launch;
  }
}

TEST_P(DriverClaims, HostCallsBreakNoCapture) {
  Stream stream(*device), other(*device);
  const VirtualMemory memory(*device, 1);
  const auto closed = gate(other);
  const Fence later = record(other);
  ASSERT_EQ(graphs->begin(stream), CUDA_SUCCESS);
  const auto query = [&] {
    EXPECT_FALSE(later.query());
    EXPECT_FALSE(other.query());
    EXPECT_TRUE(device->probe());
  };
  query();
  std::thread(query).join();
  closed->raise();
  ASSERT_TRUE(later.synchronize(soon()));
  const auto allocate = [&] {
    const ShareableMemory shared(*device, kBytes);
    PinnedPool another(*device);
    EXPECT_EQ(another.allocate(4 * kBytes).slice().bytes, 4 * kBytes);
  };
  allocate();
  std::thread(allocate).join();
  const auto share = [&] {
    const Descriptor descriptor = PhysicalMemory::at(*device, memory.address(0))->share();
    const OpenedMemory opened(*device, descriptor, VirtualMemory::kSegmentBytes);
  };
  share();
  std::thread(share).join();
  EXPECT_TRUE(stream.is_capturing());
  EXPECT_EQ(graphs->end(stream), CUDA_SUCCESS);
}

TEST_P(DriverClaims, CaptureCannotWaitForOutsideWork) {
  Stream stream(*device), other(*device);
  const auto closed = gate(other);
  const Fence outside = record(other);
  ASSERT_EQ(graphs->begin(stream), CUDA_SUCCESS);
  try {
    outside.wait(stream);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("synchronize the device before the capture"));
  }
  EXPECT_NE(graphs->end(stream), CUDA_SUCCESS);
  graphs->forgive();
  closed->raise();
  ASSERT_TRUE(outside.synchronize(soon()));
  ASSERT_EQ(graphs->begin(stream), CUDA_SUCCESS);
  outside.wait(stream);  // it has run
  EXPECT_EQ(graphs->end(stream), CUDA_SUCCESS);
}

}  // namespace
}  // namespace weft::cuda
