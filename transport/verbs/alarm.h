// What a device says beside completions (libibverbs' asynchronous events): that it has failed, or
// one lane's queue pair or completion queue has. Nothing may come from the queue after that, not
// even flushes, so who waits for it must be told.
//
// Whoever watches a device reads its events for all its lanes; each lane has a bell of its own, as
// they may be on several loops. Two descriptors a lane.
#pragma once

#include <memory>
#include <optional>

#include <weft/base/descriptor.h>
#include <weft/transport/verbs/device.h>

namespace weft::transport::verbs {

class Alarm {
 public:
  // Of that queue pair and queue. Rings at once where the device has failed before. Throws Busy.
  Alarm(std::shared_ptr<Device> device, const ibv_qp* pair, const ibv_cq* queue);
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Readable when the device has something to say: Device::take_events() then.
  int events() const { return events_.get(); }
  // Readable when the alarm has rung, until why() is called.
  int bell() const { return bell_.get(); }
  // What has failed, with Blame::Device.
  std::optional<Error> why();

 private:
  friend class Device;
  // Under the device's mutex. The first reason stays.
  void ring(const Error& why) noexcept;

  const std::shared_ptr<Device> device_;
  const ibv_qp* const pair_;
  const ibv_cq* const queue_;
  Descriptor events_;  // the device's; an epoll takes each number once
  Descriptor bell_;
  std::optional<Error> why_;  // under the device's mutex
};

}  // namespace weft::transport::verbs
