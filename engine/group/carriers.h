// SPDX-License-Identifier: Apache-2.0
// The backends of one group, by device: which one carries the tensors of which device, and the
// communicators that have been made so far.
//
// The group's Core owns it. Which backends there are is settled when it is constructed, which may
// load libraries and opens devices. Thread-safe; nothing else blocks.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <weft/base/mutex.h>
#include <weft/engine/group/job.h>
#include <weft/transport/transport.h>

namespace weft::group {

// How tensors of one device type travel. The communicator is made at once on the host, at the first
// use on CUDA.
struct Carrier {
  std::string named;    // the backend that the program or the default names
  std::string backend;  // the backend in use; "" = none, for the reason in why_not
  std::string why_not;
  bool staged = false;  // CUDA tensors travel through host memory
  std::shared_ptr<transport::Transport> transport;
  std::shared_ptr<transport::Communicator> communicator;
  c10::Device device = c10::Device(c10::kCPU);  // the device whose tensors the communicator takes
};

class Carriers {
 public:
  // Opens the backends that `options` names. Throws if one that the user named cannot be used.
  explicit Carriers(const CoreOptions& options);

  // Throws Caller if no backend carries tensors of this device.
  const Carrier& of(c10::Device device) const;
  bool carries(c10::DeviceType type) const;
  // The backends of this rank in the form of parse_backends(), with the fallback where it replaced
  // a default.
  std::string names() const;
  // The transport that carries tensors of the group's device to a rank of the group.
  std::string transport(int peer) const;
  // The transports of the communicators that have been made, in the form of transports_text(); with
  // CUDA "shm to rank 1; cuda: nccl to rank 1".
  std::string transports() const;
  // The device of barriers: the group's device if a backend carries it, else the host.
  c10::Device barrier_device() const;
  // The device on which host values travel (counts, orders, bytes): the host if a backend carries
  // it, else the group's device.
  c10::Device host_values_device() const;

  // Stores the communicator for tensors of that device, of a type that has none yet. Called by one
  // thread at a time, which alone may read the carrier's communicator and device.
  void set(c10::Device device, std::shared_ptr<transport::Communicator> made);
  // The communicator for tensors of such a device; null if none has been made.
  std::shared_ptr<transport::Communicator> communicator(c10::DeviceType type) const;
  // The communicators that have been made, ordered by device type.
  std::vector<std::shared_ptr<transport::Communicator>> communicators() const;

 private:
  const CoreOptions& options_;
  mutable Mutex mutex_;  // held for moments only; guards communicators and their devices
  std::map<c10::DeviceType, Carrier> carriers_;
};

}  // namespace weft::group
