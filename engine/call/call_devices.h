// SPDX-License-Identifier: Apache-2.0
// The devices that one agent's calls use: its GPUs, its device maps, and the memory into which
// messages are received. Owned by AgentCore, and declared before its event loop: the memory that
// connections have retired can be freed only after the loop, which keeps the connections alive.
// Usable from every thread once prepare() has returned. The destructor waits for the GPUs.
#pragma once

#include <memory>
#include <vector>

#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/types.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/receive_pool.h>

namespace weft::call {

// The direction in which a device map is used.
enum class Way {
  Call,   // calls go by the caller's own map
  Reply,  // results go by the inverse of the caller's map
  Back,   // gradients go by the inverse of the map that the receiver's calls went by
};

class CallDevices {
 public:
  // `self` is the agent's worker and `options` are its options; both must outlive this object.
  CallDevices(std::shared_ptr<tensor::CudaDevices> devices, const WorkerInfo& self,
              const Options& options)
      : cuda_(std::move(devices)), self_(self), options_(options) {}
  ~CallDevices();
  CallDevices(const CallDevices&) = delete;
  CallDevices& operator=(const CallDevices&) = delete;

  // Sets the GPUs that calls use here, when the agent has joined. Blocks for a moment.
  void prepare(std::vector<int> gpus);
  // The destructor runs in a turn of the loop: it waits for nothing.
  void end_without_waiting() { may_block_ = false; }

  tensor::CudaDevices& cuda() { return *cuda_; }
  const std::vector<int>& gpus() const { return gpus_; }
  const DeviceMaps& maps() const { return options_.device_maps; }
  // Describes the devices here to other workers.
  WorkerDevices described() const;
  ReceiveMemory receive_memory() const { return {*receive_pool_, gpus_}; }
  // Adds the receiver's devices to the message, by the map, and has it wait for the work on this
  // thread's current streams. Throws Caller for a GPU's tensor that the map has no entry for.
  Outgoing address(codec::Encoded message, const DeviceMap& map, const WorkerInfo& to,
                   Way way) const;

 private:
  const std::shared_ptr<tensor::CudaDevices> cuda_;
  const WorkerInfo& self_;
  const Options& options_;
  const std::shared_ptr<ReceivePool> receive_pool_ = std::make_shared<ReceivePool>();
  std::vector<int> gpus_;  // fixed once prepare() has returned
  bool may_block_ = true;
};

}  // namespace weft::call
