#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/span.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/folder.h>

namespace weft::cuda {
namespace {

using trace::timeline::DeviceSpan;
using namespace std::chrono_literals;

TEST(TimedEvents, SayHowMuchTimeLiesBetweenThem) {
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

// A timeline, and a device that runs.
class Spans : public ThreadedCuda {
 protected:
  ~Spans() override { trace::timeline::finish(); }
  void record_timeline() { trace::timeline::join(folder_ + "/run.json", {"0123456789abcdef", 0, 1, {}}); }

  // Ends the timeline when it has so many (ctest's time limit ends the waiting); what stands in its part.
  static std::vector<DeviceSpan> ended(std::size_t count) {
    const std::string path = trace::timeline::own_part();
    while (read(path).size() < count) std::this_thread::yield();
    EXPECT_EQ(trace::timeline::end_part(), path);
    return read(path);
  }
  static std::vector<DeviceSpan> read(const std::string& path) {
    std::vector<DeviceSpan> spans;
    std::ifstream part(path);
    for (std::string line; std::getline(part, line);) {
      if (!line.starts_with("[\"D\"") || !line.ends_with("]")) continue;  // or it is being written
      DeviceSpan span;
      unsigned long stream = 0;
      EXPECT_EQ(std::sscanf(line.c_str(), "[\"D\",%d,%lu,%ld,%ld,\"pack\",\"kernels\",%*d,%*d,%ld", &span.device, &stream,
                            &span.begin, &span.end, &span.error),
                5)
          << line;
      spans.push_back(span);
    }
    return spans;
  }

  std::vector<std::pair<std::int64_t, std::int64_t>> bounds;

 private:
  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
};

TEST_F(Spans, AreNothingWithoutATimeline) {
  const Stream stream(*device);
  const int events = fake.calls(&Driver::event_create);
  Span span = Span::begin(stream, "pack", trace::Layer::Kernels);
  span.end(stream);
  EXPECT_EQ(fake.calls(&Driver::event_create), events);
  EXPECT_EQ(fake.pending(stream), 0u);
}

TEST_F(Spans, LieWhereTheDeviceDidTheWorkByTheHostsClockWithinTheErrorThatIsStated) {
  record_timeline();
  const Stream stream(*device);
  for (int i = 0; i < 3; ++i) {
    const std::int64_t before = trace::now();
    fake.delay(&Driver::launch_kernel, 20ms);
    Span span = Span::begin(stream, "pack", trace::Layer::Kernels, 64, 3);
    ASSERT_EQ(fake.enqueue(stream.native(), "kernel", [] {}), CUDA_SUCCESS);
    span.end(stream);
    ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
    bounds.emplace_back(before, trace::now());
  }
  const auto shown = ended(bounds.size());
  ASSERT_EQ(shown.size(), bounds.size());
  for (std::size_t i = 0; i < shown.size(); ++i) {
    EXPECT_GT(shown[i].error, 0);
    EXPECT_GE(shown[i].begin, bounds[i].first - shown[i].error);
    EXPECT_LE(shown[i].end, bounds[i].second + shown[i].error);
    EXPECT_LE(shown[i].begin, shown[i].end);
    EXPECT_GE(shown[i].end, bounds[i].first + 20'000'000 - shown[i].error) << "the kernel's delay, from its launch";
  }
}

TEST_F(Spans, ThatNobodyEndsAreNotShown) {
  record_timeline();
  const Stream stream(*device);
  {
    Span dropped = Span::begin(stream, "pack", trace::Layer::Kernels);
    Span kept = Span::begin(stream, "pack", trace::Layer::Kernels);
    kept.end(stream);
    kept.end(stream);
  }
  ASSERT_TRUE(record(stream).synchronize(Deadline::in(10s)));
  EXPECT_EQ(ended(1).size(), 1u);
}

TEST_F(Spans, OfAStreamThatIsLostAreLeftOut) {
  record_timeline();
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

#endif

}  // namespace
}  // namespace weft::cuda
