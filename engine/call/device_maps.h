// Which device of a worker a tensor goes to: rpc::Options::device_maps and devices, as rules.
// Without an entry, host memory goes to host memory and a GPU's nowhere. Answers go by the inverse
// of the caller's map. The semantics are those of torch.distributed.rpc's TensorPipe options.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <weft/engine/call/types.h>

namespace weft::rpc {

// One worker's rules for tensors that go to another; one to one.
class DeviceMap {
 public:
  // All is host memory.
  DeviceMap() = default;
  explicit DeviceMap(std::vector<std::pair<c10::Device, c10::Device>> pairs)
      : pairs_(std::move(pairs)) {}
  // That of a worker for calls to another; what it leaves out is as by default.
  static DeviceMap to(const std::string& worker, const DeviceMaps& maps);

  DeviceMap inverse() const;
  // The receiver's device; nothing where there is no rule.
  std::optional<c10::Device> find(const c10::Device& from) const;
  // Whether a GPU is on either side: such tensors need a lane that carries device memory.
  bool has_gpus() const;

 private:
  std::vector<std::pair<c10::Device, c10::Device>> pairs_;
};

// What a worker tells the others about its devices, in the job's store.
struct WorkerDevices {
  int gpus = 0;                      // how many it has
  std::vector<c10::Device> devices;  // Options::devices
  DeviceMaps maps;                   // Options::device_maps
};

// As it is stored: devices are GPUs' numbers, or -1 for the host. Throws Caller for what is no such
// record.
struct StoredDevices {
  int gpus = 0;
  std::vector<int> devices;
  std::map<std::string, std::vector<std::pair<int, int>>> maps;
  WEFT_FIELDS(gpus, devices, maps)
};
StoredDevices stored(const WorkerDevices& devices);
WorkerDevices unstored(const StoredDevices& stored);

// What can be said of one worker's options alone. Throws Caller where a device is neither the host
// nor a GPU with a number, or a map is not one to one.
void check_device_maps(const std::string& self, const DeviceMaps& maps,
                       const std::vector<c10::Device>& devices);

// A worker that is known, for the rules that concern two.
struct KnownDevices {
  std::string name;
  WorkerDevices devices;
};
// Throws Caller where a map of any of them names nobody of these (unless more may come), or a GPU
// that its worker, or the peer, does not have or does not list.
void check_device_maps(const std::vector<KnownDevices>& workers, bool more_may_come);

// The numbers of the GPUs that `self` uses in calls: those it lists; else those in its own maps,
// and in the maps of the others for it.
std::vector<int> gpus_used(const std::string& self, const std::vector<KnownDevices>& workers);

}  // namespace weft::rpc
