// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/event.h>
#include <weft/cuda/fence.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::HasSubstr;

using Events = FakeCuda;

TEST_F(Events, UnrecordedOnesHoldNothingBack) {
  Event event(*device);
  Stream stream(*device);
  EXPECT_TRUE(event.query());
  event.wait(stream);
  EXPECT_EQ(fake.pending(stream), 0u);
}

TEST_F(Events, PassWhenTheRecordedWorkHasRun) {
  Event event(*device);
  Stream stream(*device);
  fake.hold(stream);
  event.record(stream);
  EXPECT_FALSE(event.query());
  fake.release(stream);
  fake.run();
  EXPECT_TRUE(event.query());
}

class EventsOfTwo : public FakeCuda {
 protected:
  EventsOfTwo() : FakeCuda({.devices = 2}) {}
};

TEST_F(EventsOfTwo, RecordOnTheirDeviceAndWaitOnAny) {
  auto other = Device::open(fake.driver(), 1);
  Event event(*device);
  Stream here(*device);
  Stream there(*other);
  const Error error = error_from([&] { event.record(there); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("event of cuda:0 cannot be recorded on a stream of cuda:1"));
  event.record(here);
  event.wait(there);
  EXPECT_FALSE(fake.step(there));
  EXPECT_TRUE(fake.step(here));
  EXPECT_TRUE(fake.step(there));
}

TEST_F(Events, PassWhenTheContextEnds) {
  Event event(*device);
  Stream stream(*device);
  event.record(stream);
  fake.lose_context(0);
  EXPECT_TRUE(event.query())
      << "the work will never run; whoever finishes an Op asks Device::lost()";
  EXPECT_TRUE(device->is_lost());
  take_logged();
}

TEST_F(Events, PooledOnesAreReused) {
  EventPool& pool = device->events();
  const CUevent native = [&] {
    Event event = pool.acquire();
    const CUevent handle = event.native();
    pool.release(std::move(event));
    return handle;
  }();
  const int made = fake.calls(&Driver::event_create);
  Event again = pool.acquire();
  EXPECT_EQ(again.native(), native);
  EXPECT_EQ(fake.calls(&Driver::event_create), made);
  Event another = pool.acquire();
  EXPECT_NE(another.native(), native);
  EXPECT_EQ(fake.calls(&Driver::event_create), made + 1);
}

TEST_F(Events, ReservedOnesCostNoDriverCall) {
  device->events().reserve(3);
  EXPECT_EQ(device->events().idle(), 3u);
  const int made = fake.calls(&Driver::event_create);
  Stream stream(*device);
  const Fence a = record(stream);
  const Fence b = record(stream);
  const Fence c = record(stream);
  EXPECT_EQ(fake.calls(&Driver::event_create), made);
  fake.run();
}

TEST_F(Events, AreDestroyedWithTheirDevice) {
  { const Fence fence = record(StreamRef(*device, nullptr)); }
  EXPECT_EQ(device->events().idle(), 1u);
  device.reset();
  EXPECT_EQ(fake.alive().events, 0u);
  EXPECT_EQ(fake.calls(&Driver::event_destroy), fake.calls(&Driver::event_create));
}

}  // namespace
}  // namespace weft::cuda
