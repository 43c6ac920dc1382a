// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, each with a fake GPU.
#pragma once

#include <weft/cuda/device.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/communicator/threads.h>
#include <weft/tests/harness/fake_driver.h>
#include <weft/transport/registry.h>
#include <weft/transport/staged/staged_communicator.h>

namespace weft::conformance {

class FakeGpus : public Threads {
 public:
  explicit FakeGpus(int ranks) : Threads(ranks) {}
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    harness::FakeDriver fake({.devices = ranks(), .threads = true});
    std::vector<std::shared_ptr<cuda::Device>> devices;
    for (int rank = 0; rank < ranks(); ++rank)
      devices.push_back(cuda::Device::open(fake.driver(), rank));
    run_on(fake, devices, timeout, body);
    for (auto& device : devices) reclaim(std::move(device));
  }

 protected:
  using Devices = std::vector<std::shared_ptr<cuda::Device>>;
  virtual void run_on(harness::FakeDriver& fake, const Devices& devices,
                      std::chrono::milliseconds timeout,
                      const std::function<void(Rank&)>& body) const = 0;

  static const std::shared_ptr<cuda::Device>& device_of(const Devices& devices, const Rank& rank) {
    return devices[static_cast<std::size_t>(rank.rank)];
  }
};

// A host-memory backend used through pinned memory, as a process group does for the GPU tensors of
// such a backend.
class Staged final : public FakeGpus {
 public:
  Staged(std::string backend, int ranks) : FakeGpus(ranks), backend_(std::move(backend)) {}
  std::string name() const override {
    std::string title = backend_ + "Staged";
    title.front() = static_cast<char>(std::toupper(title.front()));
    return title;
  }
  bool sees_peers_end() const override { return true; }

 protected:
  void run_on(harness::FakeDriver&, const Devices& devices, std::chrono::milliseconds timeout,
              const std::function<void(Rank&)>& body) const override {
    const auto below = transport::open(backend_);
    const auto join = [&](Rank& rank) {
      equip(rank, device_of(devices, rank));
      rank.communicator = transport::staged::over(below->join(options_for(rank, timeout)),
                                                  device_of(devices, rank), rank.loop);
    };
    run_ranks(join, body);
  }

 private:
  const std::string backend_;
};

}  // namespace weft::conformance
