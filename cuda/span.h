// What a stream does between two points, for the timeline: two events with times, and the device's
// clock held against the host's. Without a timeline nothing is recorded. Nothing here blocks or
// throws: what cannot be recorded is not shown.
//
//   cuda::Span span = cuda::Span::begin(stream, "pack", trace::Layer::Kernels, bytes);
//   …  // enqueue
//   span.end(stream);
//
// A device has no clock that the host can read: what it tells is how much time lies between two
// events. So one event is the base of those that follow, and its host time is found with a few
// more, on a stream that is idle: the host's clock is read before such an event is recorded and
// after it has been seen to pass; it passed between the two.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <weft/cuda/event.h>
#include <weft/profiling/trace/timeline.h>

namespace weft::cuda {

class Span {
 public:
  Span() = default;  // none; ending it does nothing
  // The stream comes to it after what is enqueued now. None without a timeline, and where the
  // stream is being captured: a graph is no moment. `text` has static lifetime; `rank` -1: of no
  // known one. `from` arrives at it: what brought it about was the range that this thread is in,
  // unless the caller knows of an earlier one.
  static Span begin(const StreamRef& stream, const char* text, trace::Layer layer,
                    std::uint64_t bytes = 0, int rank = -1,
                    std::optional<trace::Arrow> from = std::nullopt) noexcept;
  // The stream has done it after what is enqueued now. Without a call it is not shown.
  void end(const StreamRef& stream) noexcept;

 private:
  friend class Spans;
  struct Begun;
  std::shared_ptr<Begun> begun_;
};

// The spans of one device. Usable from every thread.
class Spans {
 public:
  explicit Spans(Device& device);
  ~Spans();
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  // Those that have ended since; by the timeline's thread, as trace::timeline::Source says. Waits
  // for the device for some tens of milliseconds at most, to hold the clocks against each other.
  void collect(const std::function<void(const trace::timeline::DeviceSpan&)>& take) noexcept;

 private:
  friend class Span;
  // An event that is the origin of later ones' times.
  struct Base {
    explicit Base(Event given) : event(std::move(given)) {}
    Event event;
    std::int64_t begun = 0;            // when it was made
    std::optional<std::int64_t> host;  // when it passed, by the host's clock
    std::int64_t error = 0;            // of that
  };
  std::shared_ptr<Base> base_for(const StreamRef& stream);
  bool locate(Base& base);
  void renew(std::shared_ptr<Base>& base);

  Device& device_;
  EventPool events_;
  std::mutex mutex_;            // of what follows
  std::shared_ptr<Base> base_;  // of what begins now
  std::vector<std::shared_ptr<Span::Begun>> ended_;
  bool asked_ = false;  // the timeline knows of this device
};

}  // namespace weft::cuda
