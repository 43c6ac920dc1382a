// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/memory.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using harness::FakeDriver;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

using Flags = FakeCuda;

TEST_F(Flags, HostRaiseReleasesWaitingStreams) {
  FlagPool flags(*device);
  Stream a(*device);
  Stream b(*device);
  const auto flag = flags.make();
  const Fence fence(flag);
  const int blocks = fake.host_blocks();
  fence.wait(a);
  fence.wait(b);
  EXPECT_EQ(fake.run(), 0u);
  flag->raise();
  EXPECT_EQ(fake.run(), 2u);
  EXPECT_TRUE(fence.query());
  EXPECT_EQ(fake.host_blocks(), blocks);
}

TEST_F(Flags, PassedOnesEnqueueNothing) {
  FlagPool flags(*device);
  Stream stream(*device);
  const auto flag = flags.make();
  flag->raise();
  Fence(flag).wait(stream);
  EXPECT_EQ(fake.pending(stream), 0u);
}

TEST_F(Flags, WakeTheHostLikeHostFlags) {
  FlagPool flags(*device);
  const auto flag = flags.make();
  bool told = false;
  Task tell([&] { told = true; });
  EXPECT_TRUE(flag->on_passed(tell));
  EXPECT_FALSE(flag->synchronize(Deadline::in(milliseconds(1))));
  flag->raise();
  EXPECT_TRUE(told);
  EXPECT_TRUE(flag->synchronize(Deadline::never()));
}

// The pool's rule: a stream may reach its wait when the slot already serves a later flag.
TEST_F(Flags, LateStreamPassesAReusedSlot) {
  FlagPool flags(*device);
  Stream late(*device);
  const std::size_t free = flags.usage().free;
  {
    const auto flag = flags.make();
    flag->wait(late);
    flag->raise();
  }
  EXPECT_EQ(flags.usage().free, free);
  // Every slot is taken once more, and none is raised.
  std::vector<std::shared_ptr<MappedFlag>> all;
  while (flags.usage().free > 0) all.push_back(flags.make());
  for (const auto& flag : all) EXPECT_FALSE(flag->query());
  EXPECT_EQ(fake.run(late), 1u) << "the late stream hangs on a slot that was reset";
}

TEST_F(Flags, LateStreamPassesAfterManyReuses) {
  FlagPool flags(*device);
  Stream late(*device);
  for (std::size_t use = 0; use < 3 * flags.usage().slots; ++use) {
    const auto flag = flags.make();
    if (use == 0) flag->wait(late);
    flag->raise();
  }
  EXPECT_EQ(fake.run(late), 1u);
}

TEST_F(Flags, AreIndependentOfEachOther) {
  FlagPool flags(*device);
  Stream stream(*device);
  const auto first = flags.make();
  const auto second = flags.make();
  second->wait(stream);
  first->raise();
  EXPECT_FALSE(second->query());
  EXPECT_FALSE(fake.step(stream));
  second->raise();
  EXPECT_TRUE(fake.step(stream));
}

TEST_F(Flags, DroppedUnraisedOnesReleaseAndWarn) {
  FlagPool flags(*device);
  Stream stream(*device);
  flags.make()->wait(stream);
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("dropped without being raised")));
  EXPECT_EQ(fake.run(stream), 1u) << "no stream hangs although the host has not raised the flag";
  flags.make();
  EXPECT_THAT(take_logged(), testing::IsEmpty()) << "no stream waited for that one";
}

TEST_F(Flags, GrowByAPageWhenAllAreTaken) {
  FlagPool flags(*device);
  const std::size_t slots = flags.usage().slots;
  std::vector<std::shared_ptr<MappedFlag>> all;
  for (std::size_t i = 0; i <= slots; ++i) all.push_back(flags.make());
  EXPECT_EQ(flags.usage().slots, 2 * slots);
  EXPECT_EQ(fake.calls(&Driver::mem_host_alloc), 2);
}

TEST_F(Flags, StreamRaisePassesAfterItsWork) {
  FlagPool flags(*device);
  Stream stream(*device);
  DeviceMemory memory(stream, 4);
  fill(stream, memory.slice(), 3);
  const Fence done = flags.signal(stream);
  fake.step(stream);
  fake.step(stream);
  EXPECT_FALSE(done.query());
  EXPECT_FALSE(done.synchronize(Deadline::in(milliseconds(1))));
  fake.step(stream);
  const int calls = fake.calls(&Driver::event_query);
  EXPECT_TRUE(done.query());
  EXPECT_EQ(fake.calls(&Driver::event_query), calls) << "polling is a load";
}

TEST_F(Flags, StreamRaiseReleasesAnotherStream) {
  FlagPool flags(*device);
  Stream producer(*device);
  Stream consumer(*device);
  const Fence done = flags.signal(producer);
  done.wait(consumer);
  EXPECT_FALSE(fake.step(consumer));
  fake.run(producer);
  EXPECT_TRUE(fake.step(consumer));
}

TEST_F(Flags, DroppedOnesKeepTheirSlotUntilRaised) {
  FlagPool flags(*device);
  Stream slow(*device);
  fake.hold(slow);
  const std::size_t free = flags.usage().free;
  flags.signal(slow);  // nobody keeps the fence
  EXPECT_EQ(flags.usage().free, free - 1);
  // All others are taken: the slot that the slow stream will write to must not be among them.
  std::vector<std::shared_ptr<MappedFlag>> all;
  for (std::size_t i = 0; i < free; ++i) all.push_back(flags.make());
  for (const auto& flag : all) flag->raise();
  fake.release(slow);
  fake.run();
  for (const auto& flag : all) EXPECT_TRUE(flag->query()) << "a late write took back a flag";
}

TEST_F(Flags, FailedSignalFreesItsSlot) {
  FlagPool flags(*device);
  Stream stream(*device);
  const std::size_t free = flags.usage().free;
  fake.fail(&Driver::stream_write_value32, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(error_from([&] { flags.signal(stream); }).blame(), Blame::Busy);
  EXPECT_EQ(flags.usage().free, free);
}

TEST_F(Flags, StreamRaisePassesOnContextLoss) {
  FlagPool flags(*device);
  Stream stream(*device);
  const Fence done = flags.signal(stream);
  fake.lose_context(0);
  EXPECT_TRUE(done.synchronize(Deadline::in(std::chrono::seconds(30))))
      << "the word alone would never change";
  EXPECT_TRUE(device->is_lost());
  take_logged();
}

class FlagsOfTwo : public FakeCuda {
 protected:
  FlagsOfTwo() : FakeCuda({.devices = 2}) {}
};

TEST_F(FlagsOfTwo, ReleaseOtherDevicesOnContextLoss) {
  FlagPool flags(*device);
  auto other = Device::open(fake.driver(), 1);
  Stream here(*device);
  Stream there(*other);
  const auto flag = flags.make();
  flag->wait(there);
  EXPECT_FALSE(fake.step(there));
  flag->raise();
  EXPECT_TRUE(fake.step(there));

  const Fence done = flags.signal(here);
  done.wait(there);
  fake.lose_context(0);
  EXPECT_TRUE(done.synchronize(Deadline::in(std::chrono::seconds(30))));
  EXPECT_TRUE(fake.step(there)) << "it would wait for a write that never comes";
  take_logged();
}

TEST_F(FlagsOfTwo, PagesOutliveWaitsOfAllDevices) {
  auto other = Device::open(fake.driver(), 1);
  Stream there(*other);
  {
    FlagPool flags(*device);
    const auto flag = flags.make();
    flag->wait(there);
    flag->raise();
  }
  EXPECT_EQ(fake.pending(there), 1u);
  EXPECT_EQ(fake.calls(&Driver::mem_free_host), 0) << "a destructor must not block";
  // The wait is still enqueued; freeing its word first would be a use of freed memory, which the
  // fake complains of.
  EXPECT_TRUE(device->retirement().reclaim_all(Deadline::never()));
  EXPECT_EQ(fake.pending(there), 0u);
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
}

// The pool is destroyed before a stream has reached its wait.
TEST_F(Flags, PagesStayUntilDrainingSucceeds) {
  Stream late(*device);
  {
    FlagPool flags(*device);
    const auto flag = flags.make();
    flag->wait(late);
    flag->raise();
  }
  fake.fail(&Driver::ctx_synchronize, CUDA_ERROR_OUT_OF_MEMORY);
  device->retirement().reclaim();
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("cuCtxSynchronize")));
  EXPECT_EQ(fake.calls(&Driver::mem_free_host), 0);
  EXPECT_EQ(fake.pending(late), 1u);
  EXPECT_EQ(device->retirement().pending(), 1u);
  device->retirement().reclaim();
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
  EXPECT_EQ(device->retirement().pending(), 0u);
}

TEST_F(Flags, FreeingPagesBreaksNoCapture) {
  Stream captured(*device);
  { FlagPool flags(*device); }
  FakeDriver::Graph graph;
  EXPECT_EQ(fake.begin_capture(captured), CUDA_SUCCESS);
  device->retirement().reclaim();
  EXPECT_EQ(fake.end_capture(captured, graph), CUDA_SUCCESS);
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
}

TEST_F(Flags, OutliveTheirPool) {
  auto flags = std::make_unique<FlagPool>(*device);
  Stream stream(*device);
  auto flag = flags->make();
  flag->wait(stream);
  flags.reset();
  EXPECT_EQ(device->retirement().pending(), 0u);
  flag->raise();
  fake.run();
  flag.reset();
  EXPECT_GT(device->retirement().pending(), 0u);
  device->retirement().reclaim();
  EXPECT_EQ(fake.alive().pinned_allocations, 0u);
}

using ThreadedFlags = ThreadedCuda;

TEST_F(ThreadedFlags, PingPongBetweenHostAndStream) {
  FlagPool flags(*device);
  Stream stream(*device);
  for (int i = 0; i < 200; ++i) {
    const auto go = flags.make();
    go->wait(stream);
    const Fence done = flags.signal(stream);
    EXPECT_FALSE(done.query());
    go->raise();
    ASSERT_TRUE(done.synchronize(Deadline::in(std::chrono::seconds(30))));
  }
}

}  // namespace
}  // namespace weft::cuda
