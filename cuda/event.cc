// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/cuda/event.h>

namespace weft::cuda {

void EventRef::record(const StreamRef& stream) const {
  if (&stream.device() != device_) {
    throw Error(Blame::Caller,
                "an event of " + describe(device_->id()) + " cannot be recorded on a stream of " +
                    describe(stream.device().id()) + "; take it from that device's events()");
  }
  DeviceGuard guard(*device_);
  device_->check(device_->driver().event_record(native_, stream.native()), "cuEventRecord");
}

void EventRef::wait(const StreamRef& stream) const {
  DeviceGuard guard(stream.device());
  const CUresult result =
      stream.driver().stream_wait_event(stream.native(), native_, CU_EVENT_WAIT_DEFAULT);
  if (result == CUDA_ERROR_STREAM_CAPTURE_ISOLATION) {
    throw Error(Blame::Caller,
                "a stream that is captured into a CUDA graph cannot wait for what was enqueued "
                "before the capture and has not "
                "run yet; synchronize the device before the capture begins",
                result);
  }
  stream.device().check(result, "cuStreamWaitEvent");
}

bool EventRef::query() const noexcept {
  try {
    DeviceGuard guard(*device_);
    RelaxedCapture relaxed(device_->driver());
    const CUresult result = device_->driver().event_query(native_);
    if (result == CUDA_ERROR_NOT_READY || is_of_capture(result)) return false;
    if (result != CUDA_SUCCESS) device_->lose(result);
  } catch (const Error& error) {
    device_->lose(static_cast<CUresult>(error.native_code()));
  }
  return true;
}

std::chrono::nanoseconds elapsed(const EventRef& from, const EventRef& to) {
  float milliseconds = 0;
  DeviceGuard guard(from.device());
  from.device().check(
      from.device().driver().event_elapsed_time(&milliseconds, from.native(), to.native()),
      "cuEventElapsedTime");
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6));
}

Event::Event(Device& device, Timing timing) : EventRef(device, nullptr) {
  const unsigned flags = timing == Timing::On ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
  DeviceGuard guard(device);
  device.check(device.driver().event_create(&native_, flags), "cuEventCreate");
}

Event::~Event() { destroy(); }

Event::Event(Event&& other) noexcept : EventRef(other) { other.native_ = nullptr; }

Event& Event::operator=(Event&& other) noexcept {
  if (this != &other) {
    destroy();
    EventRef::operator=(other);
    other.native_ = nullptr;
  }
  return *this;
}

void Event::destroy() noexcept {
  if (native_ == nullptr) return;
  try {
    DeviceGuard guard(*device_);
    device_->check(device_->driver().event_destroy(native_), "cuEventDestroy");
  } catch (const Error& error) {
    if (!device_->is_lost()) log::error(error.text());
  }
}

Event EventPool::acquire() {
  {
    MutexLock lock(mutex_);
    if (!idle_.empty()) {
      Event event = std::move(idle_.back());
      idle_.pop_back();
      return event;
    }
  }
  return Event(device_, timing_);
}

void EventPool::release(Event event) noexcept {
  MutexLock lock(mutex_);
  idle_.push_back(std::move(event));
}

void EventPool::reserve(std::size_t events) {
  while (idle() < events) release(Event(device_, timing_));
}

std::size_t EventPool::idle() const {
  MutexLock lock(mutex_);
  return idle_.size();
}

}  // namespace weft::cuda
