// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/call_devices.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::call {

namespace {

// How long the end of an agent waits for its GPUs at most.
constexpr auto kReclaim = std::chrono::seconds(5);

Error unmapped(const c10::Device& from, const WorkerInfo& self, const WorkerInfo& to, Way way) {
  const std::string what = "a tensor on " + from.str() + " cannot be sent ";
  switch (way) {
    case Way::Call:
      return Error(Blame::Caller, what + "to " + describe(to) + ": rpc::Options::device_maps[\"" +
                                      to.name +
                                      "\"] has no entry for it; add one, or send tensor.cpu()");
    case Way::Reply:
      return Error(
          Blame::Caller,
          what + "back to " + describe(to) +
              ": there is no response device mapping for it; have rpc::Options::device_maps[\"" +
              self.name + "\"] of " + to.name + " map one of its devices to " + from.str() +
              ", or return tensor.cpu()");
    case Way::Back: break;
  }
  return Error(Blame::Caller, "a gradient on " + from.str() + " cannot be sent back to " +
                                  describe(to) + ": rpc::Options::device_maps[\"" + self.name +
                                  "\"] of " + to.name + " maps none of its devices to " +
                                  from.str());
}

}  // namespace

CallDevices::~CallDevices() {
  cuda_->end_connections();
  if (may_block_) cuda_->reclaim(Deadline::in(kReclaim));
}

void CallDevices::prepare(std::vector<int> gpus) {
  gpus_ = std::move(gpus);
  cuda_->prepare_connections(gpus_);
}

WorkerDevices CallDevices::described() const {
  return {cuda_->count(), options_.devices, options_.device_maps};
}

Outgoing CallDevices::address(codec::Encoded message, const DeviceMap& map, const WorkerInfo& to,
                              Way way) const {
  Outgoing outgoing(std::move(message));
  bool is_behind_streams = false;
  for (const codec::Part& part : outgoing.message.parts) {
    const c10::Device from = part.device();
    const auto mapped = map.find(from);
    if (!mapped) throw unmapped(from, self_, to, way);
    if (from.is_cuda() && part.storage.nbytes() > 0 &&
        part.storage.data_ptr().get_context() == nullptr) {
      throw Error(
          Blame::Caller,
          "a tensor on " + from.str() +
              " over memory that is not its own (from_blob) cannot be sent; send tensor.clone()");
    }
    is_behind_streams = is_behind_streams || from.is_cuda();
    outgoing.to.push_back(tensor::device_of(*mapped));
  }
  if (is_behind_streams) {
    for (const int gpu : gpus_) {
      cuda_->refuse_capture(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu)),
                            "a message with CUDA tensors",
                            "it is sent only once, not at each launch of the graph");
    }
    outgoing.ready = cuda_->recorded(tensor::CudaDevices::current_streams(gpus_));
  }
  return outgoing;
}

}  // namespace weft::call
