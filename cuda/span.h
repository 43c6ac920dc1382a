// SPDX-License-Identifier: Apache-2.0
// Records for the timeline what a stream does between two points: two timed events, with the
// device's clock related to the host's. Records nothing without a timeline. Never blocks or throws:
// a span that cannot be recorded is not shown.
//
//   cuda::Span span = cuda::Span::begin(stream, "pack", trace::Layer::Kernels, bytes);
//   …  // enqueue
//   span.end(stream);
//
// The host cannot read a device's clock: the device reports only the time between two events. So
// one event is the base of the events after it, and its host time is found with a few probe events
// on an idle stream: the host's clock is read before a probe is recorded and after it is seen to
// have passed; the probe passed between the two.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/cuda/event.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/trace.h>

namespace weft::cuda {

class Span {
 public:
  Span() = default;  // no span; end() does nothing
  // Begins a span after the work that is enqueued now. Returns no span without a timeline, or while
  // the stream is being captured, because a graph runs at other times. `text` must have static
  // lifetime; `rank` -1 means unknown. The arrow `from` ends at the span: it starts at the cause,
  // which is the range that this thread is in unless the caller knows an earlier one.
  static Span begin(const StreamRef& stream, const char* text, trace::Layer layer,
                    std::uint64_t bytes = 0, int rank = -1,
                    std::optional<trace::Arrow> from = std::nullopt) noexcept;
  // Ends the span after the work that is enqueued now. Without this call the span is not shown.
  void end(const StreamRef& stream) noexcept;

 private:
  friend class Spans;
  struct Begun;
  std::shared_ptr<Begun> begun_;
};

// The spans of one device. Any thread may use it.
class Spans {
 public:
  explicit Spans(Device& device);
  ~Spans();
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  // Passes the spans that have ended since the last call to `take`. Called on the timeline's
  // thread, as trace::timeline::Source requires. Waits for the device for some tens of milliseconds
  // at most, to compare the clocks.
  void collect(const std::function<void(const trace::timeline::DeviceSpan&)>& take) noexcept;

 private:
  friend class Span;
  // An event from which the times of later events are measured.
  struct Base {
    explicit Base(Event given) : event(std::move(given)) {}
    Event event;
    std::int64_t begun = 0;            // when it was made, by the host's clock
    std::optional<std::int64_t> host;  // when it passed, by the host's clock
    std::int64_t error = 0;            // the error of `host`, in nanoseconds
  };
  std::shared_ptr<Base> base_for(const StreamRef& stream);
  bool locate(Base& base);
  void renew(std::shared_ptr<Base>& base);

  Device& device_;
  EventPool events_;
  Mutex mutex_;
  std::shared_ptr<Base> base_ WEFT_GUARDED_BY(mutex_);  // the base for spans that begin now
  std::vector<std::shared_ptr<Span::Begun>> ended_ WEFT_GUARDED_BY(mutex_);
  bool asked_ WEFT_GUARDED_BY(mutex_) = false;  // the timeline knows this device
};

}  // namespace weft::cuda
