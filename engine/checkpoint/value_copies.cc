// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
#include <set>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/base/large_copy.h>
#include <weft/base/log.h>
#include <weft/engine/checkpoint/value_copies.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::checkpoint {

namespace {

using tensor::CudaDevices;

c10::Event recorded(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

// A thread writes the copies, and long after: they go past the caches.
void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  if (!from.is_cpu() || from._is_zerotensor() || !from.is_contiguous() || from.is_conj() ||
      from.is_neg()) {
    to.copy_(from);
    return;
  }
  auto* const out = static_cast<char*>(to.mutable_data_ptr());
  const auto* const in = static_cast<const char*>(from.const_data_ptr());
  constexpr std::int64_t kLeastOfAThread = 1 << 20;
  at::parallel_for(0, static_cast<std::int64_t>(from.nbytes()), kLeastOfAThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     copy_past_caches(out + begin, in + begin,
                                      static_cast<std::size_t>(end - begin));
                   });
}

}  // namespace

void ValueCopies::start(const Share& share, const at::Tensor& memory, bool stages) {
  const c10::AutoGradMode no_grad(false);
  auto* const bytes = static_cast<char*>(memory.mutable_data_ptr());
  struct OnGpu {
    std::vector<at::Tensor> from, to;
  };
  std::map<c10::DeviceIndex, OnGpu> gpus;
  for (std::size_t i = 0; i < share.tensors.size(); ++i) {
    const at::Tensor& from = share.tensors[i];
    if (from.numel() == 0) continue;
    at::Tensor to = at::from_blob(bytes + share.slices[i].slice.begin, from.sizes(),
                                  from.options().device(at::kCPU).requires_grad(false));
    if (!from.is_cuda()) {
      copy_on_host(to, from);
      continue;
    }
    OnGpu& gpu = gpus[from.device().index()];
    gpu.from.push_back(from.detach());
    gpu.to.push_back(std::move(to));
  }
  try {
    for (auto& [index, gpu] : gpus) {
      const auto copies = stages ? staged(gpu.from) : std::vector<at::Tensor>();
      if (!copies.empty()) {
        copy_beside(copies, gpu.to);
        continue;
      }
      for (std::size_t i = 0; i < gpu.from.size(); ++i)
        gpu.to[i].copy_(gpu.from[i], /*non_blocking=*/true);
      made_.push_back(recorded(CudaDevices::current_stream(gpu.from.front().device())));
      read_.insert(read_.end(), gpu.from.begin(), gpu.from.end());
    }
  } catch (...) {
    wait_for_gpus(share.tensors);  // the caller frees the memory that some of them write
    throw;
  }
}

// Empty if there is no memory for them.
std::vector<at::Tensor> ValueCopies::staged(const std::vector<at::Tensor>& tensors) const {
  std::vector<at::Tensor> copies;
  const auto no_room = group::error_of([&] {
    for (const at::Tensor& tensor : tensors)
      copies.push_back(at::empty(tensor.sizes(), tensor.options()));
  });
  if (no_room) {
    log::info(
        "checkpoint::save_async: the GPU has no memory to stage this rank's values "
        "(SaveOptions::stage_on_gpu), so its next kernels wait until the host has them: " +
        no_room->text());
    return {};
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) copies[i].copy_(tensors[i]);
  return copies;
}

void ValueCopies::copy_beside(const std::vector<at::Tensor>& from,
                              const std::vector<at::Tensor>& to) {
  const c10::Device device = from.front().device();
  const c10::Stream side = CudaDevices::pool_streams({device.index()}).front();
  recorded(CudaDevices::current_stream(device)).block(side);
  const c10::StreamGuard current(side);
  for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
  made_.push_back(recorded(side));
  read_.insert(read_.end(), from.begin(), from.end());
}

// The host waits, so the memory may go back to the stream that it was allocated on.
void ValueCopies::wait() {
  for (const c10::Event& event : made_) event.synchronize();
  made_.clear();
  read_.clear();
}

void wait_for_gpus(const std::vector<at::Tensor>& tensors) {
  std::set<c10::DeviceIndex> gpus;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cuda()) gpus.insert(tensor.device().index());
  }
  for (const c10::DeviceIndex gpu : gpus)
    c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(gpu);
}

void wait_for_all_gpus() {
  if (!at::globalContext().hasCUDA()) return;
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  for (c10::DeviceIndex gpu = 0; gpu < cuda.deviceCount(); ++gpu) {
    // A context on a GPU that this process does not use would cost memory there.
    if (at::detail::getCUDAHooks().hasPrimaryContext(gpu)) cuda.synchronizeDevice(gpu);
  }
}

}  // namespace weft::checkpoint
