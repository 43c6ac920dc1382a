// SPDX-License-Identifier: Apache-2.0
// Tests that the fake driver does what the driver's documentation says, and complains of misuse
// that a real driver would punish.
#include <array>
#include <thread>

#include <unistd.h>

#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/library.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/cuda/virtual_memory.h>

namespace weft::cuda {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Fake : public FakeCuda {
 protected:
  explicit Fake(harness::FakeDriver::Options options = {}) : FakeCuda(options), guard(*device) {}

  const Driver& driver = device->driver();
  DeviceGuard guard;  // most tests here call the driver directly
};

TEST_F(Fake, IsAloneAndFillsTheWholeTable) {
  EXPECT_EQ(error_from([] { harness::FakeDriver second; }).blame(), Blame::Caller);
  const auto* const slots = reinterpret_cast<void* const*>(&driver);
  for (std::size_t i = 0; i < sizeof driver / sizeof(void*); ++i) EXPECT_NE(slots[i], nullptr) << i;
}

TEST(FakeGone, ReturnsDeinitialized) {
  std::shared_ptr<const Driver> table;
  {
    harness::FakeDriver fake;
    table = fake.driver();
  }
  int count = 0;
  EXPECT_EQ(table->device_get_count(&count), CUDA_ERROR_DEINITIALIZED);
  harness::FakeDriver next;
  EXPECT_EQ(table->device_get_count(&count), CUDA_SUCCESS);
}

TEST_F(Fake, CountsCallsByFunction) {
  EXPECT_EQ(fake.calls(&Driver::stream_query), 0);
  driver.stream_query(nullptr);
  driver.stream_query(nullptr);
  EXPECT_EQ(fake.calls(&Driver::stream_query), 2);
  EXPECT_EQ(fake.calls(&Driver::stream_synchronize), 0);
}

TEST_F(Fake, FailsTheNthCallOnce) {
  fake.fail(&Driver::stream_query, CUDA_ERROR_UNKNOWN, 2);
  EXPECT_EQ(driver.stream_query(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(driver.stream_query(nullptr), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(driver.stream_query(nullptr), CUDA_SUCCESS);
}

TEST_F(Fake, HoldsBackOnlyOneFunction) {
  Stream a(*device);
  Stream b(*device);
  DeviceMemory memory(a, 4);
  fake.run();
  fake.hold(&Driver::memset_d8_async);
  fill(a, memory.slice(), 1);
  record(b);
  EXPECT_EQ(fake.run(), 1u);
  EXPECT_EQ(fake.pending(a), 1u);
  fake.release(&Driver::memset_d8_async);
  EXPECT_EQ(fake.run(), 1u);
}

TEST_F(Fake, DelaysOperationsOfAFunction) {
  Stream stream(*device);
  fake.delay(&Driver::event_record, milliseconds(30));
  const Fence fence = record(stream);
  EXPECT_EQ(fake.run(), 0u);
  while (fake.run() == 0) std::this_thread::yield();
  EXPECT_TRUE(fence.query());
}

TEST_F(Fake, ListsEnqueuedAndExecutedCalls) {
  Stream a(*device);
  Stream b(*device);
  record(a);
  DeviceMemory memory(b, 4);
  fake.run(b);
  fake.run(a);
  EXPECT_THAT(fake.enqueued(), ElementsAre("cuEventRecord", "cuMemAllocAsync"));
  EXPECT_THAT(fake.executed(), ElementsAre("cuMemAllocAsync", "cuEventRecord"));
  EXPECT_THAT(fake.executed(a), ElementsAre("cuEventRecord"));
}

TEST_F(Fake, WaitKeepsTheRecordItWasGiven) {
  Event event(*device);
  Stream first(*device);
  Stream second(*device);
  Stream waiter(*device);
  event.record(first);
  event.wait(waiter);
  event.record(second);
  fake.run(second);
  EXPECT_TRUE(event.query()) << "the event now stands for the new record";
  EXPECT_FALSE(fake.step(waiter)) << "the stream still waits for the old record";
  fake.run(first);
  EXPECT_TRUE(fake.step(waiter));
}

TEST_F(Fake, DestroyedEventHoldsBackWaiters) {
  Stream first(*device);
  Stream waiter(*device);
  {
    Event event(*device);
    event.record(first);
    event.wait(waiter);
  }
  EXPECT_FALSE(fake.step(waiter));
  fake.run(first);
  EXPECT_TRUE(fake.step(waiter));
}

TEST_F(Fake, HostFunctionMustNotCallCuda) {
  Stream stream(*device);
  struct Seen {
    const Driver* driver;
    CUresult result;
  } seen{&driver, CUDA_SUCCESS};
  driver.launch_host_func(
      stream.native(),
      [](void* data) {
        static_cast<Seen*>(data)->result = static_cast<Seen*>(data)->driver->stream_query(nullptr);
      },
      &seen);
  EXPECT_EQ(seen.result, CUDA_SUCCESS);
  fake.run();
  EXPECT_EQ(seen.result, CUDA_ERROR_NOT_PERMITTED);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("inside a host function")));
}

TEST_F(Fake, SynchronizingRunsAllAndIsCounted) {
  Stream stream(*device);
  const Fence fence = record(stream);
  EXPECT_EQ(driver.stream_synchronize(stream.native()), CUDA_SUCCESS);
  EXPECT_TRUE(fence.query());
  EXPECT_EQ(driver.ctx_synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(fake.host_blocks(), 2);
}

class Impatient : public Fake {
 protected:
  Impatient() : Fake({.longest_block = milliseconds(20)}) {}
};

TEST_F(Impatient, EndlessSynchronizeNamesItsCause) {
  Stream stream(*device);
  fake.hold(stream);
  record(stream);
  EXPECT_EQ(driver.ctx_synchronize(), CUDA_ERROR_UNKNOWN);
  EXPECT_THAT(fake.take_complaints(),
              ElementsAre(HasSubstr(
                  "cuCtxSynchronize waits for ever: stream 2 of cuda:0 at cuEventRecord (held)")));
  fake.release(stream);
  fake.run();
}

TEST_F(Impatient, FreeingPinnedMemoryWaits) {
  Stream stream(*device);
  void* memory = nullptr;
  ASSERT_EQ(
      driver.mem_host_alloc(&memory, 64, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
      CUDA_SUCCESS);
  fake.hold(stream);
  record(stream);
  EXPECT_EQ(driver.mem_free_host(memory), CUDA_ERROR_UNKNOWN);
  fake.take_complaints();
  fake.release(stream);
  EXPECT_EQ(driver.mem_free_host(memory), CUDA_SUCCESS);
  EXPECT_EQ(fake.pending(stream), 0u) << "it has waited";
}

TEST_F(Fake, PageableCopyBlocksTheHost) {
  Stream stream(*device);
  DeviceMemory memory(stream, 4);
  const std::array<char, 4> pageable{1, 2, 3, 4};
  const int blocks = fake.host_blocks();
  driver.memcpy_async(reinterpret_cast<CUdeviceptr>(memory.slice().data),
                      reinterpret_cast<CUdeviceptr>(pageable.data()), 4, stream.native());
  EXPECT_EQ(fake.host_blocks(), blocks + 1);
  EXPECT_EQ(static_cast<const char*>(memory.slice().data)[3], 4);
}

TEST_F(Fake, ComplainsOfUseBeforeAllocation) {
  Stream owner(*device);
  Stream hasty(*device);
  DeviceMemory memory(owner, 4);
  fill(hasty, memory.slice(), 1);
  fake.run(hasty);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("has not been reached yet")));
  EXPECT_EQ(driver.stream_query(hasty.native()), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_FALSE(device->probe()) << "the misuse ends the context";
  take_logged();
}

TEST_F(Fake, ComplainsOfUseAfterFree) {
  Stream owner(*device);
  Stream late(*device);
  DeviceMemory other(late, 4);
  {
    DeviceMemory memory(owner, 4);
    fill(late, memory.slice(), 1);
  }
  fake.run(owner);
  fake.run(late);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("freed before")));
  EXPECT_FALSE(device->probe()) << "the misuse ends the context";
  take_logged();
}

TEST_F(Fake, ComplainsOfOverruns) {
  Stream stream(*device);
  DeviceMemory memory(stream, 4);
  EXPECT_EQ(driver.memset_d8_async(reinterpret_cast<CUdeviceptr>(memory.slice().data), 0, 5,
                                   stream.native()),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("runs over the end")));
}

// True if the byte at `address` can be read. Asks the kernel, because a direct read could crash the
// test.
bool readable(const void* address) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return false;
  const bool copied = ::write(ends[1], address, 1) == 1;
  ::close(ends[0]);
  ::close(ends[1]);
  return copied;
}

TEST_F(Fake, FreedAndAdjacentMemoryIsProtected) {
  Stream stream(*device);
  const std::byte* data = nullptr;
  {
    DeviceMemory memory(stream, 512);
    data = static_cast<const std::byte*>(memory.slice().data);
    fake.run();
    EXPECT_TRUE(readable(data));
    EXPECT_TRUE(readable(data + 511));
    EXPECT_FALSE(readable(data + 512));
  }
  EXPECT_TRUE(readable(data)) << "the stream has not reached the free";
  fake.run();
  EXPECT_FALSE(readable(data));
}

TEST_F(Fake, VirtualMemoryLivesWhileHeld) {
  const std::size_t bytes = VirtualMemory::kSegmentBytes;
  CUmemGenericAllocationHandle held = 0;
  {
    VirtualMemory memory(*device, 2);
    EXPECT_EQ(fake.alive().physical_memories, 2u);
    EXPECT_EQ(fake.alive().mappings, 2u);
    EXPECT_EQ(fake.alive().reservations, 1u);
    EXPECT_EQ(fake.alive().device_allocations, 0u);
    EXPECT_TRUE(readable(memory.segment(0).data));
    ASSERT_EQ(driver.mem_retain_allocation_handle(&held, memory.segment(0).data), CUDA_SUCCESS);
    memory.unmap(0);
    EXPECT_FALSE(readable(memory.segment(0).data));
    EXPECT_EQ(driver.mem_map(memory.address(0), bytes, 0, held, 0), CUDA_SUCCESS);
    EXPECT_FALSE(readable(memory.segment(0).data)) << "no device was given access";
    memory.unmap(0);
  }
  EXPECT_EQ(fake.alive().physical_memories, 1u);
  EXPECT_EQ(fake.alive().mappings + fake.alive().reservations, 0u);
  EXPECT_EQ(driver.mem_release(held), CUDA_SUCCESS);
  EXPECT_EQ(fake.alive().physical_memories, 0u);
}

TEST_F(Fake, UnheldMemoryHandlesAreReused) {
  VirtualMemory memory(*device, 1);
  const auto handle_now = [&] {
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(driver.mem_retain_allocation_handle(&handle, memory.segment(0).data), CUDA_SUCCESS);
    EXPECT_EQ(driver.mem_release(handle), CUDA_SUCCESS);
    return handle;
  };
  const auto first = handle_now();
  memory.unmap(0);
  memory.map(0);
  EXPECT_EQ(handle_now(), first) << "so code that compares handles must hold them";
}

TEST_F(Fake, ComplainsOfVirtualMemoryMisuse) {
  const std::size_t bytes = VirtualMemory::kSegmentBytes;
  Stream stream(*device);
  VirtualMemory memory(*device, 3);
  CUmemGenericAllocationHandle held = 0;
  ASSERT_EQ(driver.mem_retain_allocation_handle(&held, memory.segment(0).data), CUDA_SUCCESS);
  EXPECT_EQ(driver.mem_map(memory.address(1), bytes, 0, held, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_map(memory.address(3), bytes, 0, held, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_unmap(memory.address(0), 2 * bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_unmap(memory.address(0), bytes / 2), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_address_free(memory.address(0), 3 * bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_address_free(memory.address(0), bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_free(memory.address(0)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_free_async(memory.address(0), stream.native()), CUDA_ERROR_INVALID_VALUE);
  memory.unmap(2);
  EXPECT_EQ(driver.memset_d8_async(memory.address(1), 0, bytes + 1, stream.native()),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_map(memory.address(2), bytes, 0, held, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.memset_d8_async(memory.address(2), 0, 1, stream.native()),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.mem_unmap(memory.address(2), bytes), CUDA_SUCCESS);
  EXPECT_EQ(driver.mem_release(held), CUDA_SUCCESS);
  EXPECT_EQ(driver.mem_release(held + 7), CUDA_ERROR_INVALID_VALUE);
  EXPECT_THAT(fake.take_complaints(),
              ElementsAre(HasSubstr("over other memory"), HasSubstr("not reserved"),
                          HasSubstr("not one mapping"), HasSubstr("not one mapping"),
                          HasSubstr("with memory mapped"), HasSubstr("not a reservation"),
                          HasSubstr("not by cuMemAlloc"), HasSubstr("freed twice"),
                          HasSubstr("runs over the end"), HasSubstr("cuMemSetAccess"),
                          HasSubstr("nobody holds")));
}

TEST_F(Fake, UnmappingWaitsForTheDevice) {
  Stream stream(*device);
  VirtualMemory memory(*device, 1);
  fill(stream, memory.segment(0).part(0, 4), 1);
  memory.unmap(0);
  EXPECT_EQ(fake.pending(stream), 0u);
}

TEST_F(Fake, ComplainsOfFreeingTwice) {
  Stream stream(*device);
  CUdeviceptr memory = 0;
  ASSERT_EQ(driver.mem_alloc_async(&memory, 4, stream.native()), CUDA_SUCCESS);
  EXPECT_EQ(driver.mem_free_async(memory, stream.native()), CUDA_SUCCESS);
  EXPECT_EQ(driver.mem_free_async(memory, stream.native()), CUDA_ERROR_INVALID_VALUE);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("freed twice")));
  fake.run();
}

TEST_F(Fake, ComplainsOfStaleHandlesAndNoContext) {
  const CUstream stale = Stream(*device).native();
  EXPECT_EQ(driver.stream_query(stale), CUDA_ERROR_INVALID_HANDLE);
  driver.ctx_set_current(nullptr);
  EXPECT_EQ(driver.stream_query(nullptr), CUDA_ERROR_INVALID_CONTEXT);
  driver.ctx_set_current(device->context());
  EXPECT_THAT(fake.take_complaints(),
              ElementsAre(HasSubstr("after it was destroyed"), HasSubstr("without one")));
}

TEST_F(Fake, RefusesLegacySynchronizingStreams) {
  CUstream stream = nullptr;
  EXPECT_EQ(driver.stream_create_with_priority(&stream, CU_STREAM_DEFAULT, 0),
            CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("legacy default stream")));
}

TEST(FakeHang, IsReportedWhenNothingCanEndIt) {
  harness::FakeDriver fake;
  auto device = Device::open(fake.driver(), 0);
  {
    PinnedPool pool(*device);
    const PinnedMemory word = pool.allocate(4);
    *static_cast<std::uint32_t*>(word.slice().data) = 0;
    Stream stream(*device);
    DeviceGuard guard(*device);
    device->driver().stream_wait_value32(stream.native(), word.address(), 1,
                                         CU_STREAM_WAIT_VALUE_GEQ);
  }
  log::Capture quiet([](LogLevel, std::string_view) {});
  device.reset();
  EXPECT_THAT(fake.take_complaints(),
              ElementsAre(HasSubstr("hangs for ever at cuStreamWaitValue32 wait")));
}

TEST_F(Fake, LostContextDropsWorkAndFailsCalls) {
  Stream stream(*device);
  int ran = 0;
  driver.launch_host_func(
      stream.native(), [](void* data) { ++*static_cast<int*>(data); }, &ran);
  fake.lose_context(0, CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(fake.run(), 0u);
  EXPECT_EQ(ran, 0) << "host functions are not called once the context has ended";
  EXPECT_EQ(driver.stream_query(stream.native()), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(driver.ctx_synchronize(), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_FALSE(device->probe());
  take_logged();
}

class ThreadedFake : public Fake {
 protected:
  ThreadedFake() : Fake({.threads = true}) {}
};

TEST_F(ThreadedFake, StreamsRunAndWaitForEachOther) {
  Stream a(*device);
  Stream b(*device);
  DeviceMemory memory(a, 4096);
  fake.hold(a);
  fill(a, memory.slice(), 1);
  record(a).wait(b);
  fill(b, memory.slice(), 2);
  const Fence done = record(b);
  EXPECT_FALSE(done.query());
  fake.release(a);
  EXPECT_TRUE(done.synchronize(Deadline::in(std::chrono::seconds(30))));
  EXPECT_EQ(static_cast<const unsigned char*>(memory.slice().data)[4095], 2);
}

TEST_F(ThreadedFake, SynchronizingWaitsForTheThreads) {
  Stream stream(*device);
  std::atomic<int> ran{0};
  for (int i = 0; i < 50; ++i) {
    driver.launch_host_func(
        stream.native(), [](void* data) { ++*static_cast<std::atomic<int>*>(data); }, &ran);
  }
  EXPECT_EQ(driver.stream_synchronize(stream.native()), CUDA_SUCCESS);
  EXPECT_EQ(ran, 50);
}

TEST_F(Fake, CaptureMustRejoinItsStreams) {
  Stream stream(*device), other(*device);
  DeviceMemory memory(stream, 16);
  fake.run();
  harness::FakeDriver::Graph graph;
  ASSERT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
  record(stream).wait(other);
  fill(other, memory.slice(), 1);
  EXPECT_EQ(fake.end_capture(stream, graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  EXPECT_FALSE(graph);
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("had waited for the others")));
  EXPECT_EQ(fake.pending(), 0u) << "no captured work runs";
}

TEST_F(Fake, UnrepeatableCallsBreakACapture) {
  Stream stream(*device);
  Event outside(*device), inside(*device);
  harness::FakeDriver::Graph graph;
  const auto breaks = [&](auto call) {
    EXPECT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
    inside.record(stream);
    call();
    EXPECT_EQ(fake.end_capture(stream, graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_FALSE(fake.take_complaints().empty());
  };
  breaks([&] {
    EXPECT_EQ(driver.event_query(outside.native()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  });
  breaks([&] {
    std::thread([&] {
      DeviceGuard here(*device);
      EXPECT_EQ(driver.event_query(outside.native()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }).join();
  });
  breaks([&] {
    CUdeviceptr address = 0;
    EXPECT_EQ(driver.mem_alloc(&address, 16), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  });
  // This call breaks a capture even in the relaxed mode.
  breaks([&] {
    const RelaxedCapture relaxed(driver);
    EXPECT_EQ(driver.event_query(inside.native()), CUDA_ERROR_CAPTURED_EVENT);
  });
  EXPECT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
  {
    const RelaxedCapture relaxed(driver);
    EXPECT_EQ(driver.event_query(outside.native()), CUDA_SUCCESS);
  }
  EXPECT_EQ(fake.end_capture(stream, graph), CUDA_SUCCESS);
}

TEST_F(Fake, GraphBranchesForkAndJoin) {
  Stream stream(*device), other(*device);
  std::vector<int> order;
  harness::FakeDriver::Graph graph;
  const auto mark = [&](Stream& on, int number) {
    fake.enqueue(on.native(), "mark", [&order, number] { order.push_back(number); });
  };
  ASSERT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
  mark(stream, 1);
  const Fence first = record(stream);
  first.wait(other);
  mark(other, 2);
  mark(stream, 3);
  record(other).wait(stream);
  mark(stream, 4);
  ASSERT_EQ(fake.end_capture(stream, graph), CUDA_SUCCESS);
  fake.run();
  EXPECT_THAT(order, IsEmpty());
  ASSERT_EQ(fake.launch(graph, stream), CUDA_SUCCESS);
  fake.run(stream);
  EXPECT_THAT(order, ElementsAre(1, 3)) << "the branch has not run, and the stream waits for it";
  fake.run();
  EXPECT_THAT(order, ElementsAre(1, 3, 2, 4));
}

}  // namespace
}  // namespace weft::cuda
