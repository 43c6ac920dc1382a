// SPDX-License-Identifier: Apache-2.0
// Device maps: the device to which a worker's tensor is sent, by the rules in
// rpc::Options::device_maps and devices. Without an entry, host memory goes to host memory and a
// GPU's tensor is refused. Results go by the inverse of the caller's map. The semantics are those
// of torch.distributed.rpc's TensorPipe options.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <weft/engine/call/types.h>

namespace weft::call {

// One worker's rules for tensors that it sends to another worker. They are one to one.
class DeviceMap {
 public:
  // Maps host memory to host memory, and nothing else.
  DeviceMap() = default;
  explicit DeviceMap(std::vector<std::pair<c10::Device, c10::Device>> pairs)
      : pairs_(std::move(pairs)) {}
  // A worker's map for its calls to `worker`. Devices without an entry go by the default.
  static DeviceMap to(const std::string& worker, const DeviceMaps& maps);

  DeviceMap inverse() const;
  // The receiver's device; nothing if there is no rule.
  std::optional<c10::Device> find(const c10::Device& from) const;
  // Whether a GPU is on either side: its tensors need a connection that carries device memory.
  bool has_gpus() const;

 private:
  std::vector<std::pair<c10::Device, c10::Device>> pairs_;
};

// A worker's devices, as it publishes them in the job's store.
struct WorkerDevices {
  int gpus = 0;                      // number of GPUs that it has
  std::vector<c10::Device> devices;  // Options::devices
  DeviceMaps maps;                   // Options::device_maps
};

// WorkerDevices as they are stored: a device is a GPU's number, or -1 for the host. unstored()
// throws Caller for numbers of no device.
struct StoredDevices {
  int gpus = 0;
  std::vector<int> devices;
  std::map<std::string, std::vector<std::pair<int, int>>> maps;
  WEFT_FIELDS(gpus, devices, maps)
};
StoredDevices stored(const WorkerDevices& devices);
WorkerDevices unstored(const StoredDevices& stored);

// Checks one worker's options alone. Throws Caller if a device is neither the host nor a GPU with a
// number, or if a map is not one to one.
void check_device_maps(const std::string& self, const DeviceMaps& maps,
                       const std::vector<c10::Device>& devices);

// The devices of a worker that is known, for the rules that concern two workers.
struct KnownDevices {
  std::string name;
  WorkerDevices devices;
};
// Throws Caller if a map names a worker that is not among `workers` (unless more may come), or a
// GPU that its worker, or the peer, does not have or does not list.
void check_device_maps(const std::vector<KnownDevices>& workers, bool more_may_come);

// The numbers of the GPUs that `self` uses in calls: those that it lists. If it lists none: those
// in its own maps, and in the other workers' maps for it.
std::vector<int> gpus_used(const std::string& self, const std::vector<KnownDevices>& workers);

}  // namespace weft::call
