// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <weft/base/event_loop.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using std::chrono::milliseconds;

using EventFences = FakeCuda;

TEST_F(EventFences, PassOnlyAfterRecordedWork) {
  Stream stream(*device);
  DeviceMemory memory(stream, 16);
  fill(stream, memory.slice(), 1);
  const Fence ready = record(stream);
  fill(stream, memory.slice(), 2);
  EXPECT_FALSE(ready.query());
  fake.step(stream);
  fake.step(stream);
  EXPECT_FALSE(ready.query());
  fake.step(stream);
  EXPECT_TRUE(ready.query());
  EXPECT_FALSE(stream.query()) << "work enqueued after the record does not count";
}

TEST_F(EventFences, PassedOnesAskTheDriverNoMore) {
  Stream stream(*device);
  const Fence ready = record(stream);
  fake.run();
  EXPECT_TRUE(ready.query());
  const int asked = fake.calls(&Driver::event_query);
  EXPECT_TRUE(ready.query());
  EXPECT_TRUE(ready.synchronize());
  EXPECT_EQ(fake.calls(&Driver::event_query), asked);
}

TEST_F(EventFences, HoldBackStreamsNotTheHost) {
  Stream producer(*device);
  Stream consumer(*device);
  DeviceMemory from(producer, 4);
  DeviceMemory to(producer, 4);
  fill(producer, from.slice(), 9);
  const Fence ready = record(producer);
  const int blocks = fake.host_blocks();
  ready.wait(consumer);
  copy(consumer, to.slice(), from.slice());
  EXPECT_EQ(fake.host_blocks(), blocks);
  EXPECT_FALSE(fake.step(consumer)) << "nothing was produced yet";
  fake.run(producer);
  fake.run(consumer);
  EXPECT_EQ(*static_cast<const unsigned char*>(to.slice().data), 9);
}

TEST_F(EventFences, WaitQueriesNoDriverAndSkipsPassedFences) {
  Stream producer(*device);
  Stream consumer(*device);
  const Fence ready = record(producer);
  const int asked = fake.calls(&Driver::event_query);
  ready.wait(consumer);
  EXPECT_EQ(fake.calls(&Driver::event_query), asked);
  EXPECT_EQ(fake.calls(&Driver::stream_wait_event), 1);
  fake.run();
  EXPECT_TRUE(ready.query());
  ready.wait(consumer);
  EXPECT_EQ(fake.calls(&Driver::stream_wait_event), 1);
}

TEST_F(EventFences, LostContextHoldsNoStreamBack) {
  Stream producer(*device);
  Stream consumer(*device);
  const Fence ready = record(producer);
  fake.lose_context(0);
  EXPECT_NO_THROW(ready.wait(consumer));
  EXPECT_TRUE(device->is_lost());
  EXPECT_THAT(take_logged(), testing::ElementsAre(testing::HasSubstr("cuda:0 is lost")));
}

TEST_F(EventFences, LastCopyReleasesTheEvent) {
  Stream stream(*device);
  Fence first = record(stream);
  const Fence copy = first;
  first = Fence();
  EXPECT_EQ(device->events().idle(), 0u);
  const Fence other = record(stream);
  fake.step(stream);
  EXPECT_TRUE(copy.query());
  EXPECT_FALSE(other.query()) << "the second fence must not have taken the first one's event";
}

TEST_F(EventFences, DroppedOnesStillHoldBackWaiters) {
  Stream producer(*device);
  Stream consumer(*device);
  Stream elsewhere(*device);
  fake.hold(producer);
  {
    const Fence ready = record(producer);
    ready.wait(consumer);
  }
  ASSERT_EQ(device->events().idle(), 1u);
  const Fence reuse = record(elsewhere);
  ASSERT_EQ(device->events().idle(), 0u) << "the same event, recorded anew";
  fake.run();
  EXPECT_TRUE(reuse.query());
  EXPECT_EQ(fake.pending(consumer), 1u)
      << "it waits for the producer's work, not for the new record";
  fake.release(producer);
  fake.run();
  EXPECT_EQ(fake.pending(consumer), 0u);
}

TEST_F(EventFences, SynchronizeGivesUpAtTheDeadline) {
  Stream stream(*device);
  const Fence ready = record(stream);
  EXPECT_FALSE(ready.synchronize(Deadline::in(milliseconds(1))));
  fake.run();
  EXPECT_TRUE(ready.synchronize(Deadline::in(milliseconds(0))));
  EXPECT_EQ(fake.calls(&Driver::event_synchronize), 0)
      << "it polls, because the driver's call has no deadline";
}

TEST_F(EventFences, SynchronizeReturnsAfterTheWork) {
  Stream stream(*device);
  const Fence ready = record(stream);
  std::thread runner([&] { fake.run(); });
  EXPECT_TRUE(ready.synchronize(Deadline::in(std::chrono::seconds(30))));
  runner.join();
}

TEST_F(EventFences, LostDevicePassesWithItsError) {
  Stream stream(*device);
  const Fence ready = record(stream);
  fake.lose_context(0);
  EXPECT_TRUE(ready.synchronize(Deadline::in(std::chrono::seconds(30))));
  EXPECT_EQ(device->lost()->blame(), Blame::Device);
  EXPECT_EQ(error_from([&] { record(stream); }).blame(), Blame::Device);
  take_logged();
}

TEST_F(EventFences, FailedRecordLeavesNothingBehind) {
  Stream stream(*device);
  fake.fail(&Driver::event_record, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(error_from([&] { record(stream); }).blame(), Blame::Busy);
  EXPECT_EQ(device->events().idle(), 0u);
  EXPECT_EQ(fake.alive().events, 1u) << "only the device's own probe";
}

TEST_F(EventFences, ArePolledByAnEventLoop) {
  Stream stream(*device);
  const Fence ready = record(stream);
  EventLoop loop("fences");
  auto flag = std::make_shared<HostFlag>();
  loop.when(ready, [flag] { flag->raise(); });
  EXPECT_FALSE(flag->query());
  fake.run();
  EXPECT_TRUE(flag->synchronize(Deadline::in(std::chrono::seconds(30))));
}

TEST_F(EventFences, OutliveStreamAndDeviceHandle) {
  Fence ready;
  {
    Stream stream(*device);
    ready = record(stream);
  }
  device.reset();
  EXPECT_FALSE(ready.query());
  fake.run();
  EXPECT_TRUE(ready.query());
  ready = Fence();
  EXPECT_EQ(fake.alive().contexts, 0u);
}

}  // namespace
}  // namespace weft::cuda
