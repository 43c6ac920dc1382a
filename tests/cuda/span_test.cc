// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/span.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/device_timeline.h>

namespace weft::cuda {
namespace {

using trace::timeline::DeviceSpan;
using namespace std::chrono_literals;

TEST(TimedEvents, MeasureTheTimeBetweenThem) {
  harness::FakeDriver fake({.threads = true});
  const auto device = Device::open(fake.driver(), 0);
  const Stream stream(*device);
  const Event first(*device, Event::Timing::On);
  const Event second(*device, Event::Timing::On);
  const auto before = std::chrono::steady_clock::now();
  first.record(stream);
  ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
  fake.delay(&Driver::event_record, 5ms);
  second.record(stream);
  ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
  const auto after = std::chrono::steady_clock::now();
  EXPECT_GE(elapsed(first, second), 4900us);
  EXPECT_LE(elapsed(first, second), after - before);
  EXPECT_LE(elapsed(second, first), 0ns);
}

#if WEFT_TRACE_ENABLED

class Spans : public ThreadedCuda {};

TEST_F(Spans, CostNothingWithoutATimeline) {
  const Stream stream(*device);
  const int events = fake.calls(&Driver::event_create);
  Span span = Span::begin(stream, "pack", trace::Layer::Kernels);
  span.end(stream);
  EXPECT_EQ(fake.calls(&Driver::event_create), events);
  EXPECT_EQ(fake.pending(stream), 0u);
}

TEST_F(Spans, LieWithinTheStatedClockError) {
  harness::DeviceTimeline timeline;
  const Stream stream(*device);
  std::vector<std::pair<std::int64_t, std::int64_t>> bounds;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t before = trace::now();
    fake.delay(&Driver::launch_kernel, 20ms);
    Span span = Span::begin(stream, "pack", trace::Layer::Kernels, 64, 3);
    ASSERT_EQ(fake.enqueue(stream.native(), "kernel", [] {}), CUDA_SUCCESS);
    span.end(stream);
    ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
    bounds.emplace_back(before, trace::now());
  }
  const auto shown = timeline.ended(bounds.size());
  ASSERT_EQ(shown.size(), bounds.size());
  for (std::size_t i = 0; i < shown.size(); ++i) {
    EXPECT_EQ(shown[i].name, "pack");
    EXPECT_EQ(shown[i].layer, "kernels");
    EXPECT_EQ(shown[i].bytes, 64u);
    EXPECT_EQ(shown[i].rank, 3);
    EXPECT_GT(shown[i].error, 0);
    EXPECT_GE(shown[i].begin, bounds[i].first - shown[i].error);
    EXPECT_LE(shown[i].end, bounds[i].second + shown[i].error);
    EXPECT_LE(shown[i].begin, shown[i].end);
    EXPECT_GE(shown[i].end, bounds[i].first + 20'000'000 - shown[i].error)
        << "the span includes the kernel's delay after its launch";
  }
}

TEST_F(Spans, UnendedOnesAreNotShown) {
  harness::DeviceTimeline timeline;
  const Stream stream(*device);
  {
    Span dropped = Span::begin(stream, "pack", trace::Layer::Kernels);
    Span kept = Span::begin(stream, "pack", trace::Layer::Kernels);
    kept.end(stream);
    kept.end(stream);
  }
  ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
  EXPECT_EQ(timeline.ended(1).size(), 1u);
}

TEST_F(Spans, LostDeviceShowsNone) {
  harness::DeviceTimeline timeline;
  const Stream stream(*device);
  Span span = Span::begin(stream, "pack", trace::Layer::Kernels);
  fake.lose_context(0);
  EXPECT_FALSE(device->probe());
  span.end(stream);
  Span second = Span::begin(stream, "pack", trace::Layer::Kernels);
  second.end(stream);
  device->spans().collect([](const DeviceSpan&) { ADD_FAILURE() << "a span of a lost device"; });
  take_logged();
}

// Queued work is enqueued by another thread than the one that caused it, so a caller can give the
// arrow's start.
TEST_F(Spans, ArrowStartsAtRangeOrGivenPoint) {
  constinit static trace::Name bucket{trace::Layer::User, "bucket"},
      gradient{trace::Layer::User, "gradient"};
  harness::DeviceTimeline timeline;
  const Stream stream(*device);
  trace::Arrow earlier;
  {
    const trace::Range range(gradient);
    earlier = trace::Arrow::leave();
  }
  {
    const trace::Range range(bucket);
    Span::begin(stream, "first", trace::Layer::Kernels).end(stream);
    Span::begin(stream, "second", trace::Layer::Kernels, 0, -1, earlier).end(stream);
  }
  Span::begin(stream, "third", trace::Layer::Kernels).end(stream);
  ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
  EXPECT_THAT(timeline.names(3),
              testing::ElementsAre("first: 0 bytes", "second: 0 bytes", "third: 0 bytes"));
  EXPECT_THAT(timeline.arrows(), testing::ElementsAre("bucket -> first", "gradient -> second"));
}

#endif

}  // namespace
}  // namespace weft::cuda
