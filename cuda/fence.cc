// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/cuda/fence.h>
#include <weft/cuda/poll.h>

namespace weft::cuda {

Fence record(const StreamRef& stream) { return Fence(std::make_shared<EventFence>(stream)); }

bool is_captured(const Fence& fence) noexcept {
  const auto* const event = dynamic_cast<const EventFence*>(fence.source().get());
  return event != nullptr && event->is_captured();
}

EventFence::EventFence(const StreamRef& stream)
    : device_(stream.device().shared_from_this()),
      captured_(stream.is_capturing() ? std::optional(stream) : std::nullopt),
      event_(device_->events().acquire()) {
  event_.record(stream);
}

EventFence::~EventFence() { device_->events().release(std::move(event_)); }

bool EventFence::query() const noexcept {
  if (passed_.load(std::memory_order_acquire)) return true;
  if (captured_ ? captured_->is_capturing() : !event_.query()) return false;
  passed_.store(true, std::memory_order_release);
  return true;
}

bool EventFence::synchronize(Deadline deadline) const noexcept {
  return poll_until([this] { return query(); }, deadline);
}

void EventFence::wait(const StreamRef& stream) const {
  if (passed_.load(std::memory_order_acquire)) return;
  if ((captured_ || stream.is_capturing()) && query()) return;
  try {
    event_.wait(stream);
  } catch (const Error&) {
    if (!query()) throw;  // the fence has passed, because the event's context has ended
  }
}

bool EventFence::on_passed(Task&) const { return false; }

}  // namespace weft::cuda
