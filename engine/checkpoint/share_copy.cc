// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/share_copy.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::checkpoint {

namespace {

constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
// The thread that writes is woken for so many bytes.
constexpr std::uint64_t kStep = std::uint64_t{16} << 20;

bool has_cuda(const Share& share) {
  return std::ranges::any_of(share.tensors, [](const at::Tensor& one) { return one.is_cuda(); });
}

at::Tensor memory_for(const Share& share) {
  at::Tensor memory;
  const auto bytes = static_cast<std::int64_t>(share.bytes);
  const auto no_room = group::error_of([&] {
    memory = has_cuda(share) ? at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true))
                             : KeptBytes::take(share.bytes);
    if (!memory.defined()) memory = paged_bytes(share.bytes);
  });
  if (no_room) {
    throw Error(Blame::Busy, "there is no memory for a copy of this rank's " +
                                 std::to_string(share.bytes) + " bytes of the checkpoint");
  }
  return memory;
}

}  // namespace

ShareCopy::ShareCopy(Share share) : share_(std::move(share)), memory_(memory_for(share_)) {}

void ShareCopy::run() {
  failure_ = group::error_of([&] { copy(); });
  if (copies_.empty()) share_.tensors.clear();
  copied_.store(kAll, std::memory_order_release);
  copied_.notify_all();
}

void ShareCopy::copy() {
  const c10::AutoGradMode no_grad(false);
  auto* const bytes = static_cast<char*>(memory_.mutable_data_ptr());
  const bool is_on_host = !has_cuda(share_);
  std::vector<c10::Device> devices;
  std::uint64_t told = 0;
  for (std::size_t i = 0; i < share_.tensors.size(); ++i) {
    const at::Tensor& from = share_.tensors[i];
    const Slice& slice = share_.slices[i].slice;
    if (from.numel() == 0) continue;
    at::Tensor to = at::from_blob(bytes + slice.begin, from.sizes(),
                                  from.options().device(at::kCPU).requires_grad(false));
    to.copy_(from, from.is_cuda());
    if (from.is_cuda() && std::ranges::find(devices, from.device()) == devices.end())
      devices.push_back(from.device());
    const std::uint64_t end = slice.begin + slice.bytes;
    if (!is_on_host || end / kStep == told / kStep) continue;
    copied_.store(told = end, std::memory_order_release);
    copied_.notify_all();
  }
  for (const c10::Device device : devices) {
    copies_.emplace_back(device.type());
    copies_.back().record(tensor::CudaDevices::current_stream(device));
  }
}

void ShareCopy::wait_for(std::uint64_t bytes) {
  std::uint64_t copied = copied_.load(std::memory_order_acquire);
  while (copied < bytes) {
    copied_.wait(copied, std::memory_order_acquire);
    copied = copied_.load(std::memory_order_acquire);
  }
  if (copied != kAll) return;
  if (failure_) throw Error(*failure_);
  std::call_once(arrived_, [&] {
    for (const c10::Event& event : copies_) event.synchronize();
    share_.tensors.clear();
  });
}

}  // namespace weft::checkpoint
