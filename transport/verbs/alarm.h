// SPDX-License-Identifier: Apache-2.0
// Reports a device's asynchronous events (libibverbs): that the device, or a connection's queue
// pair or completion queue, has failed. After that the queue may deliver no more completions, not
// even flushes, so an alarm must wake the connection that waits for them.
//
// Any connection that watches a device reads its events for all its connections. Each connection
// has its own bell, because connections may run on different event loops. An alarm uses two
// descriptors.
#pragma once

#include <memory>
#include <optional>

#include <weft/base/descriptor.h>
#include <weft/base/mutex.h>
#include <weft/transport/verbs/device.h>

namespace weft::transport::verbs {

class Alarm {
 public:
  // Watches this queue pair and completion queue. Rings at once if the device has already failed.
  // Throws Busy.
  Alarm(std::shared_ptr<Device> device, const ibv_qp* pair, const ibv_cq* queue);
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Readable when the device has events; call Device::take_events() then.
  int events() const { return events_.get(); }
  // Readable from when the alarm rings until why() is called.
  int bell() const { return bell_.get(); }
  // Returns the failure, with Blame::Device; empty if there is none.
  std::optional<Error> why();

 private:
  friend class Device;
  // Keeps the first reason. Requires device_->mutex_, which the device knows by another name.
  void ring(const Error& why) noexcept WEFT_UNCHECKED_LOCKING;

  const std::shared_ptr<Device> device_;
  const ibv_qp* const pair_;
  const ibv_cq* const queue_;
  // A duplicate of the device's descriptor, as an epoll accepts each descriptor only once.
  Descriptor events_;
  Descriptor bell_;
  std::optional<Error> why_ WEFT_GUARDED_BY(device_->mutex_);
};

}  // namespace weft::transport::verbs
