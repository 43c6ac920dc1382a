// SPDX-License-Identifier: Apache-2.0
#include <mutex>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/carriers.h>
#include <weft/transport/registry.h>
#include <weft/transport/transports_text.h>

namespace weft::group {

namespace {

DeviceType to_weft(c10::DeviceType type) {
  return type == c10::kCUDA ? DeviceType::Cuda : DeviceType::Host;
}

// Throws if the backend cannot be used on this machine.
Carrier named_carrier(c10::DeviceType type, const std::string& backend) {
  Carrier carrier;
  carrier.named = backend;
  auto transport = transport::open(backend);
  carrier.staged = type == c10::kCUDA && !transport->reaches(DeviceType::Cuda) &&
                   transport->reaches(DeviceType::Host);
  if (carrier.staged || transport->reaches(to_weft(type))) {
    carrier.backend = backend;
    carrier.transport = std::move(transport);
  } else {
    carrier.why_not = "backend '" + backend + "' does not carry " +
                      c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors";
  }
  return carrier;
}

// Like named_carrier(), but if a default backend cannot carry host memory, the fallback replaces
// it, so that host memory always has a carrier. Throws Busy if this process is short of a resource.
Carrier default_carrier(c10::DeviceType type, const std::string& backend) {
  try {
    return named_carrier(type, backend);
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy) throw;  // the fallback would lack it too
    if (type == c10::kCPU) {
      static std::once_flag said;
      std::call_once(said, [&] {
        log::warn("groups of this process carry host memory over '" +
                  std::string(kFallbackBackend) + "': " + error.text() +
                  "; WEFT_BACKEND or ProcessGroupOptions::backend chooses another");
      });
      return named_carrier(type, kFallbackBackend);
    }
    Carrier none;
    none.named = backend;
    none.why_not = error.text();
    return none;
  }
}

}  // namespace

Carriers::Carriers(const CoreOptions& options) : options_(options) {
  const bool by_default = is_default_backend(options.backend);
  for (const auto& [type, name] : parse_backends(options.backend)) {
    carriers_[type] = by_default ? default_carrier(type, name) : named_carrier(type, name);
    if (!carriers_[type].why_not.empty())
      log::debug(options.place() + ": " + carriers_[type].why_not);
  }
}

const Carrier& Carriers::of(c10::Device device) const {
  const auto found = carriers_.find(device.type());
  if (found == carriers_.end() || found->second.backend.empty()) {
    throw Error(Blame::Caller, "no backend " + options_.place() + " carries tensors on " +
                                   device.str() +
                                   (found == carriers_.end() ? "" : ": " + found->second.why_not) +
                                   "; the group was made with backend '" + names() + "'");
  }
  return found->second;
}

c10::Device Carriers::host_values_device() const {
  return carries(c10::kCPU) ? c10::Device(c10::kCPU) : options_.device;
}

std::string Carriers::transport(int peer) const {
  const Carrier& carrier = of(barrier_device());
  MutexLock lock(mutex_);
  return carrier.communicator ? carrier.communicator->transport(peer) : carrier.backend;
}

std::string Carriers::transports() const {
  std::string text;
  MutexLock lock(mutex_);
  for (const auto& [type, carrier] : carriers_) {
    if (!carrier.communicator) continue;
    const std::string one = transport::transports_text(*carrier.communicator);
    if (one.empty()) continue;
    text += (text.empty() ? "" : "; ");
    if (type != c10::kCPU) text += c10::DeviceTypeName(type, /*lower_case=*/true) + ": ";
    text += one;
  }
  return text;
}

c10::Device Carriers::barrier_device() const {
  return carries(options_.device.type()) ? options_.device : c10::Device(c10::kCPU);
}

bool Carriers::carries(c10::DeviceType type) const {
  const auto found = carriers_.find(type);
  return found != carriers_.end() && !found->second.backend.empty();
}

std::string Carriers::names() const {
  std::string text;
  for (const auto& [type, carrier] : carriers_) {
    text += (text.empty() ? "" : ",") +
            std::string(c10::DeviceTypeName(type, /*lower_case=*/true)) + ":" +
            (carrier.backend.empty() ? carrier.named : carrier.backend);
  }
  return text;
}

void Carriers::set(c10::Device device, std::shared_ptr<transport::Communicator> made) {
  MutexLock lock(mutex_);
  Carrier& carrier = carriers_.at(device.type());
  carrier.communicator = std::move(made);
  carrier.device = device;
}

std::shared_ptr<transport::Communicator> Carriers::communicator(c10::DeviceType type) const {
  MutexLock lock(mutex_);
  const auto found = carriers_.find(type);
  return found == carriers_.end() ? nullptr : found->second.communicator;
}

std::vector<std::shared_ptr<transport::Communicator>> Carriers::communicators() const {
  std::vector<std::shared_ptr<transport::Communicator>> made;
  MutexLock lock(mutex_);
  for (const auto& [type, carrier] : carriers_) {
    if (carrier.communicator) made.push_back(carrier.communicator);
  }
  return made;
}

}  // namespace weft::group
