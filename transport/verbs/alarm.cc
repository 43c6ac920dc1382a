// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <fcntl.h>
#include <sys/eventfd.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/verbs/alarm.h>

namespace weft::transport::verbs {

Alarm::Alarm(std::shared_ptr<Device> device, const ibv_qp* pair, const ibv_cq* queue)
    : device_(std::move(device)),
      pair_(pair),
      queue_(queue),
      events_(::fcntl(device_->context()->async_fd, F_DUPFD_CLOEXEC, 0)),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!events_ || !bell_)
    throw system_error(Blame::Busy, device_->name() + ": no descriptor for its events", errno);
  MutexLock lock(device_->mutex_);
  device_->alarms_.insert(this);
  if (device_->failure_) ring(*device_->failure_);
}

Alarm::~Alarm() {
  MutexLock lock(device_->mutex_);
  device_->alarms_.erase(this);
}

void Alarm::ring(const Error& why) noexcept {
  if (!why_) why_ = why;
  static_cast<void>(::eventfd_write(bell_.get(), 1));
}

std::optional<Error> Alarm::why() {
  eventfd_t rings = 0;
  static_cast<void>(::eventfd_read(bell_.get(), &rings));
  MutexLock lock(device_->mutex_);
  return why_;
}

void Device::take_events() {
  MutexLock lock(mutex_);
  ibv_async_event event{};
  while (library_->get_async_event(context_, &event) == 0) {
    tell(event);
    // Without this, destroying the queue pair or completion queue would block.
    library_->ack_async_event(&event);
  }
  // When a device is removed, the kernel ends its event stream with an error.
  if (errno != EAGAIN && errno != EINTR)
    lose(system_error(Blame::Device, name_ + ": it reports no more events", errno));
}

void Device::tell(const ibv_async_event& event) {
  const std::string text = std::string(": ") + library_->event_type_str(event.event_type);
  const auto ring_if = [&](const auto& is_meant) WEFT_REQUIRES(mutex_) {
    for (Alarm* const alarm : alarms_) {
      if (is_meant(*alarm)) alarm->ring(Error(Blame::Device, name_ + text));
    }
  };
  switch (event.event_type) {
    case IBV_EVENT_DEVICE_FATAL: return lose(Error(Blame::Device, name_ + text));
    case IBV_EVENT_QP_FATAL:
      return ring_if([&](const Alarm& alarm) { return alarm.pair_ == event.element.qp; });
    case IBV_EVENT_CQ_ERR:
      return ring_if([&](const Alarm& alarm) { return alarm.queue_ == event.element.cq; });
    case IBV_EVENT_PORT_ERR:
      return log::warn(name_ + ":" + std::to_string(event.element.port_num) + text);
    case IBV_EVENT_PORT_ACTIVE:
      return log::info(name_ + ":" + std::to_string(event.element.port_num) + text);
    default: return;  // caused by the peer or the network; completions report it
  }
}

void Device::lose(const Error& why) {
  if (failure_) return;
  failure_ = why;
  for (Alarm* const alarm : alarms_) alarm->ring(why);
}

}  // namespace weft::transport::verbs
