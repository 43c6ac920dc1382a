// SPDX-License-Identifier: Apache-2.0
// An opened RDMA device and its protection domain, which all its connections share. Thread-safe;
// its functions are system calls of some microseconds.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/transport/verbs/library.h>
#include <weft/transport/verbs/ports.h>

namespace weft::transport::verbs {

class Alarm;

class Device {
 public:
  // Throws Unsupported, Busy.
  Device(std::shared_ptr<const Library> library, ibv_device* device);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Library& library() const { return *library_; }
  const std::string& name() const { return name_; }
  const ibv_device_attr& limits() const { return limits_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return domain_; }
  std::vector<PortReport> ports() const;
  // Checks the return value of a libibverbs call that destroys something. Returns true on success;
  // otherwise logs `what` and the reason, and returns false.
  bool has_ended(int returned, const char* what) const;
  // Reads the device's asynchronous events and rings the alarms of the connections that they
  // concern.
  void take_events();

 private:
  friend class Alarm;
  void tell(const ibv_async_event& event) WEFT_REQUIRES(mutex_);
  void lose(const Error& why) WEFT_REQUIRES(mutex_);
  PortReport report(int port) const;

  const std::shared_ptr<const Library> library_;
  const std::string name_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_device_attr limits_{};
  Mutex mutex_;
  std::set<Alarm*> alarms_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);  // set when the whole device has failed
};

// Opens all devices of this machine. Throws Unsupported, with the reasons, if none can be opened.
std::vector<std::shared_ptr<Device>> open_devices(const std::shared_ptr<const Library>& library);

// The port that was chosen for a connection, and its device.
struct Path {
  std::shared_ptr<Device> device;
  Choice choice;
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
  std::uint8_t timeout = 18;

  // "mlx5_0:1".
  std::string name() const { return choice.port.name(); }
};

// Chooses a port. Throws the errors of choose().
Path find_path(const std::vector<std::shared_ptr<Device>>& devices, const Config& config,
               const std::string& interface_address);

}  // namespace weft::transport::verbs
