// Events: points in a stream that other streams wait for and the host asks about. Used through the
// Fence that cuda::record(stream) gives (fence.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// Somebody's event. Copies freely; the event and the device must outlive it.
class EventRef {
 public:
  EventRef(Device& device, CUevent native) noexcept : device_(&device), native_(native) {}

  Device& device() const noexcept { return *device_; }
  CUevent native() const noexcept { return native_; }

  // Captures what is enqueued on the stream now; the stream must be on the event's device (Caller
  // otherwise). Streams that already wait for an earlier record go on waiting for that one; whoever
  // asks the event itself is told of the new one only.
  void record(const StreamRef& stream) const;
  // Makes the stream, of any device, wait for the last record. Does nothing if there was none.
  void wait(const StreamRef& stream) const;
  // Whether the work of the last record is done; true before the first one. True as well, with
  // Device::lost() set, once the context has ended: that work will never run.
  bool query() const noexcept;

 protected:
  Device* device_;
  CUevent native_;
};

// The time between the passing of two events of one device that were made with Timing::On and have
// passed. The driver gives it as a float of milliseconds: half a microsecond at best, more between
// events that lie far apart.
std::chrono::nanoseconds elapsed(const EventRef& from, const EventRef& to);

// An event of our own. The device must outlive it.
class Event : public EventRef {
 public:
  enum class Timing { Off, On };  // without times recording and waiting are faster
  explicit Event(Device& device, Timing timing = Timing::Off);
  // Streams that wait for it go on waiting; does not block.
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

 private:
  void destroy() noexcept;
};

// Creating an event takes microseconds, so they are used again. An event comes back when nobody can
// ask for it any more: recording it anew would change the answer. One per Device; usable from every
// thread.
class EventPool {
 public:
  explicit EventPool(Device& device, Event::Timing timing = Event::Timing::Off)
      : device_(device), timing_(timing) {}

  // One that nobody uses; made if there is none.
  Event acquire();
  void release(Event event) noexcept;
  // Makes sure that so many are there, so that acquire() calls no driver.
  void reserve(std::size_t events);
  std::size_t idle() const;

 private:
  Device& device_;
  const Event::Timing timing_;
  mutable std::mutex mutex_;
  std::vector<Event> idle_;
};

}  // namespace weft::cuda
