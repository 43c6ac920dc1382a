// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <limits>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/cuda/span.h>

namespace weft::cuda {

namespace {

using trace::timeline::DeviceSpan;

constexpr int kRounds = 8;
// In nanoseconds: the limit for one round, because the device may be busy.
constexpr std::int64_t kPatience = 20'000'000;
// In nanoseconds: the age at which a base is renewed, because the time between two events is a
// float.
constexpr std::int64_t kBaseLasts = 5'000'000'000;
// In nanoseconds: the resolution of events (about half a microsecond, by the driver's
// documentation).
constexpr std::int64_t kResolution = 1'000;
constexpr std::size_t kMostEnded = 1 << 16;  // the most spans that wait to be collected

// Does not keep the device alive, except while it collects.
class OfDevice final : public trace::timeline::Source {
 public:
  explicit OfDevice(std::weak_ptr<Device> device) : device_(std::move(device)) {}
  void collect(const std::function<void(const DeviceSpan&)>& take) noexcept override {
    if (const auto device = device_.lock()) device->spans().collect(take);
  }

 private:
  const std::weak_ptr<Device> device_;
};

}  // namespace

struct Span::Begun {
  Begun(std::shared_ptr<Spans::Base> since, Event begin, Event end)
      : base(std::move(since)), first(std::move(begin)), last(std::move(end)) {}
  std::shared_ptr<Spans::Base> base;
  Event first;
  Event last;
  DeviceSpan span;
};

Span Span::begin([[maybe_unused]] const StreamRef& stream, [[maybe_unused]] const char* text,
                 [[maybe_unused]] trace::Layer layer, [[maybe_unused]] std::uint64_t bytes,
                 [[maybe_unused]] int rank,
                 [[maybe_unused]] std::optional<trace::Arrow> from) noexcept {
  Span made;
#if WEFT_TRACE_ENABLED  // without it there are no ranges of threads either
  if (!trace::timeline::on()) return made;
  try {
    Device& device = stream.device();
    if (device.is_lost() || stream.is_capturing()) return made;
    Spans& spans = device.spans();
    auto base = spans.base_for(stream);
    auto begun =
        std::make_shared<Begun>(std::move(base), spans.events_.acquire(), spans.events_.acquire());
    begun->span.device = device.index();
    begun->span.stream = reinterpret_cast<std::uintptr_t>(stream.native());
    begun->span.label = {text, layer, bytes, rank};
    begun->first.record(stream);
    begun->span.arrow = (from ? *from : trace::Arrow::leave()).id();
    made.begun_ = std::move(begun);
  } catch (const std::exception& error) {
    log::debug(std::string("a span of a device is not shown: ") + error.what());
  }
#endif
  return made;
}

void Span::end(const StreamRef& stream) noexcept {
  const auto begun = std::move(begun_);
  if (!begun) return;
  try {
    begun->last.record(stream);
    Spans& spans = stream.device().spans();
    MutexLock lock(spans.mutex_);
    if (spans.ended_.size() < kMostEnded) spans.ended_.push_back(begun);
  } catch (const std::exception& error) {
    log::debug(std::string("a span of a device is not shown: ") + error.what());
  }
}

Spans::Spans(Device& device) : device_(device), events_(device, Event::Timing::On) {}
Spans::~Spans() = default;

// Records the first base where the first span begins; its host time is found later.
std::shared_ptr<Spans::Base> Spans::base_for(const StreamRef& stream) {
  bool is_new = false;
  {
    MutexLock lock(mutex_);
    is_new = !std::exchange(asked_, true);
    if (base_) return base_;
  }
  if (is_new) trace::timeline::ask(std::make_shared<OfDevice>(device_.weak_from_this()));
  auto made = std::make_shared<Base>(events_.acquire());
  made->begun = trace::now();
  made->event.record(stream);
  MutexLock lock(mutex_);
  if (!base_) base_ = std::move(made);
  return base_;
}

// Finds the host time of a base that has passed. Returns false if the device is too busy now.
bool Spans::locate(Base& base) {
  const Stream stream(device_, Priority::High);
  const Event probe = events_.acquire();
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t before = trace::now();
    probe.record(stream);
    std::int64_t after = before;
    bool passed = false;
    while (!passed && after - before < kPatience) {
      passed = probe.query();
      after = trace::now();
    }
    if (!passed) break;
    if (after - before >= best) continue;
    best = after - before;
    base.host = (before + after) / 2 - elapsed(base.event, probe).count();
    base.error = best / 2 + 1 + kResolution;
  }
  return base.host.has_value();
}

// Replaces an old base by a new one, recorded on an idle stream, where it passes at once.
void Spans::renew(std::shared_ptr<Base>& base) {
  if (!base->host || trace::now() - base->begun < kBaseLasts) return;
  auto made = std::make_shared<Base>(events_.acquire());
  const Stream stream(device_, Priority::High);
  made->begun = trace::now();
  made->event.record(stream);
  base = std::move(made);
}

void Spans::collect(const std::function<void(const DeviceSpan&)>& take) noexcept {
  try {
    if (device_.is_lost()) return;
    std::vector<std::shared_ptr<Span::Begun>> ended;
    {
      MutexLock lock(mutex_);
      ended.swap(ended_);
    }
    std::vector<std::shared_ptr<Span::Begun>> later;
    bool is_busy = false;  // the device is too busy to compare its clock with the host's
    for (const auto& one : ended) {
      Base& base = *one->base;
      const bool passed = one->last.query() && base.event.query();
      if (passed && !base.host && !is_busy) is_busy = !locate(base);
      if (!passed || !base.host) {
        later.push_back(one);
        continue;
      }
      DeviceSpan span = one->span;
      span.begin = *base.host + elapsed(base.event, one->first).count();
      span.end = *base.host + elapsed(base.event, one->last).count();
      span.error = base.error;
      take(span);
      events_.release(std::move(one->first));
      events_.release(std::move(one->last));
    }
    std::shared_ptr<Base> base;
    {
      MutexLock lock(mutex_);
      ended_.insert(ended_.begin(), std::make_move_iterator(later.begin()),
                    std::make_move_iterator(later.end()));
      base = base_;
    }
    if (!base) return;
    renew(base);
    MutexLock lock(mutex_);
    base_ = std::move(base);
  } catch (const std::exception& error) {
    log::debug(std::string("spans of a device are not shown: ") + error.what());
  }
}

}  // namespace weft::cuda
