// SPDX-License-Identifier: Apache-2.0
// Events: points in a stream that other streams wait for and the host queries. They are used
// through the Fence that cuda::record(stream) returns (fence.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// A view of an event. It can be copied freely; the event and the device must outlive it.
class EventRef {
 public:
  EventRef(Device& device, CUevent native) noexcept : device_(&device), native_(native) {}

  Device& device() const noexcept { return *device_; }
  CUevent native() const noexcept { return native_; }

  // Captures the work that is enqueued on the stream now. The stream must be on the event's device
  // (otherwise Caller). Streams that already wait for an earlier record keep waiting for that one;
  // queries see only the new one.
  void record(const StreamRef& stream) const;
  // Makes a stream of any device wait for the last record. Does nothing if there was none.
  void wait(const StreamRef& stream) const;
  // True if the work of the last record is done; also before the first record. Also true, with
  // Device::lost() set, once the context has ended: that work will never run.
  bool query() const noexcept;

 protected:
  Device* device_;
  CUevent native_;
};

// Returns the time between two events of one device that were made with Timing::On and have passed.
// The driver returns it as a float of milliseconds: the resolution is half a microsecond at best,
// and coarser for events that are far apart.
std::chrono::nanoseconds elapsed(const EventRef& from, const EventRef& to);

// An event that this object owns. The device must outlive it.
class Event : public EventRef {
 public:
  enum class Timing { Off, On };  // recording and waiting are faster with Off
  explicit Event(Device& device, Timing timing = Timing::Off);
  // Does not block; streams that wait for the event keep waiting.
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

 private:
  void destroy() noexcept;
};

// Creating an event takes microseconds, so events are reused. Release an event only when no code
// can query it any more, because a new record would change the result. One pool per Device; any
// thread may use it.
class EventPool {
 public:
  explicit EventPool(Device& device, Event::Timing timing = Event::Timing::Off)
      : device_(device), timing_(timing) {}

  // Returns an unused event; creates one if the pool is empty.
  Event acquire();
  void release(Event event) noexcept;
  // Creates events until the pool has this many, so that acquire() does not call the driver.
  void reserve(std::size_t events);
  std::size_t idle() const;

 private:
  Device& device_;
  const Event::Timing timing_;
  mutable Mutex mutex_;
  std::vector<Event> idle_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::cuda
