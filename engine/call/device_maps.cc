// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <weft/base/error.h>
#include <weft/engine/call/device_maps.h>

namespace weft::call {

namespace {

constexpr int kLastGpu = 127;  // the highest index in c10

// "cpu" and "cpu:0" are the same device.
bool is_same(const c10::Device& a, const c10::Device& b) {
  return a == b || (a.is_cpu() && b.is_cpu());
}

int to_number(const c10::Device& device) { return device.is_cuda() ? device.index() : -1; }

c10::Device to_device(int number) {
  if (number < -1 || number > kLastGpu)
    throw Error(Blame::Caller,
                "a worker's record in the job's store has a device number out of range");
  return number < 0 ? c10::Device(c10::kCPU)
                    : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(number));
}

// "worker0's rpc::Options::device_maps["worker1"] maps cuda:0 to cuda:1"
std::string in_words(const std::string& self, const std::string& peer,
                     const std::pair<c10::Device, c10::Device>& pair) {
  return self + "'s rpc::Options::device_maps[\"" + peer + "\"] maps " + pair.first.str() + " to " +
         pair.second.str();
}

void check_device(const c10::Device& device, const std::string& what) {
  if (device.is_cpu()) return;
  if (device.is_cuda() && device.has_index()) return;
  throw Error(Blame::Caller, what + ": '" + device.str() +
                                 "' is neither cpu nor a GPU with its number, as in cuda:0" +
                                 (device.is_cuda() ? " (its index must not be negative)" : ""));
}

bool has(const std::vector<c10::Device>& devices, const c10::Device& device) {
  return device.is_cpu() || devices.empty() ||
         std::find(devices.begin(), devices.end(), device) != devices.end();
}

void check_side(const c10::Device& device, const KnownDevices& worker, const std::string& what) {
  if (device.is_cuda() && device.index() >= worker.devices.gpus) {
    throw Error(Blame::Caller, what + ", and " + worker.name + " has " +
                                   (worker.devices.gpus == 0 ? "no GPU"
                                                             : std::to_string(worker.devices.gpus) +
                                                                   " GPUs, from cuda:0 on"));
  }
  if (!has(worker.devices.devices, device)) {
    throw Error(Blame::Caller, what + ", and the rpc::Options::devices of " + worker.name +
                                   " do not list " + device.str());
  }
}

}  // namespace

DeviceMap DeviceMap::to(const std::string& worker, const DeviceMaps& maps) {
  const auto found = maps.find(worker);
  return found == maps.end() ? DeviceMap() : DeviceMap(found->second);
}

DeviceMap DeviceMap::inverse() const {
  std::vector<std::pair<c10::Device, c10::Device>> pairs;
  for (const auto& [from, to] : pairs_) pairs.emplace_back(to, from);
  return DeviceMap(std::move(pairs));
}

std::optional<c10::Device> DeviceMap::find(const c10::Device& from) const {
  for (const auto& [one, other] : pairs_) {
    if (is_same(one, from)) return other;
  }
  if (from.is_cpu()) return from;
  return std::nullopt;
}

bool DeviceMap::has_gpus() const {
  return std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) {
    return pair.first.is_cuda() || pair.second.is_cuda();
  });
}

StoredDevices stored(const WorkerDevices& devices) {
  StoredDevices stored{devices.gpus, {}, {}};
  for (const c10::Device& device : devices.devices) stored.devices.push_back(to_number(device));
  for (const auto& [worker, pairs] : devices.maps) {
    auto& numbers = stored.maps[worker];
    for (const auto& [from, to] : pairs) numbers.emplace_back(to_number(from), to_number(to));
  }
  return stored;
}

WorkerDevices unstored(const StoredDevices& stored) {
  WorkerDevices devices{stored.gpus, {}, {}};
  for (const int number : stored.devices) devices.devices.push_back(to_device(number));
  for (const auto& [worker, numbers] : stored.maps) {
    auto& pairs = devices.maps[worker];
    for (const auto& [from, to] : numbers) pairs.emplace_back(to_device(from), to_device(to));
  }
  return devices;
}

void check_device_maps(const std::string& self, const DeviceMaps& maps,
                       const std::vector<c10::Device>& devices) {
  for (const c10::Device& device : devices) {
    check_device(device, self + "'s rpc::Options::devices");
    if (device.is_cpu())
      throw Error(Blame::Caller,
                  self + "'s rpc::Options::devices list cpu; they are the GPUs to use");
  }
  for (const auto& [peer, pairs] : maps) {
    for (auto pair = pairs.begin(); pair != pairs.end(); ++pair) {
      const std::string what = in_words(self, peer, *pair);
      check_device(pair->first, what);
      check_device(pair->second, what);
      // A call to this worker itself sends nothing: arguments and results are passed as they are.
      if (peer == self && !is_same(pair->first, pair->second)) {
        throw Error(
            Blame::Caller,
            what +
                ": calls to oneself pass tensors as they are; map each device to itself, or none");
      }
      for (auto earlier = pairs.begin(); earlier != pair; ++earlier) {
        if (!is_same(earlier->first, pair->first) && !is_same(earlier->second, pair->second))
          continue;
        throw Error(Blame::Caller,
                    what + ", and " + earlier->first.str() + " to " + earlier->second.str() +
                        ": a map must be one to one, because results come back by its inverse");
      }
    }
  }
}

void check_device_maps(const std::vector<KnownDevices>& workers, bool more_may_come) {
  for (const KnownDevices& worker : workers) {
    for (const auto& [name, pairs] : worker.devices.maps) {
      const auto peer =
          std::find_if(workers.begin(), workers.end(),
                       [&, &wanted = name](const auto& one) { return one.name == wanted; });
      if (peer == workers.end()) {
        if (more_may_come) continue;
        std::string known;
        for (const KnownDevices& one : workers) known += (known.empty() ? "" : ", ") + one.name;
        throw Error(Blame::Caller,
                    worker.name + "'s rpc::Options::device_maps name '" + name +
                        "', and no worker of this job has that name; the workers are " + known);
      }
      for (const auto& pair : pairs) {
        check_side(pair.first, worker, in_words(worker.name, name, pair));
        check_side(pair.second, *peer, in_words(worker.name, name, pair));
      }
    }
    for (const c10::Device& device : worker.devices.devices) {
      check_side(device, worker, worker.name + "'s rpc::Options::devices list " + device.str());
    }
  }
}

std::vector<int> gpus_used(const std::string& self, const std::vector<KnownDevices>& workers) {
  std::set<int> used;
  const auto use = [&](const c10::Device& device) {
    if (device.is_cuda()) used.insert(device.index());
  };
  for (const KnownDevices& worker : workers) {
    if (worker.name == self) {
      for (const c10::Device& device : worker.devices.devices) use(device);
      for (const auto& [peer, pairs] : worker.devices.maps) {
        for (const auto& [from, to] : pairs) use(from);
      }
    }
    if (const auto found = worker.devices.maps.find(self); found != worker.devices.maps.end()) {
      for (const auto& [from, to] : found->second) use(to);
    }
  }
  return {used.begin(), used.end()};
}

}  // namespace weft::call
