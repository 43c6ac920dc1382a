// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <weft/engine/shard/offload.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::shard {

namespace {

using tensor::CudaDevices;

// The stream waits for what the current stream of its device has enqueued.
void follow_current(const c10::Stream& stream) {
  c10::Event ready(stream.device_type());
  ready.record(CudaDevices::current_stream(stream.device()));
  ready.block(stream);
}

}  // namespace

HostCopy::HostCopy(const at::Tensor& from, at::ScalarType dtype, Work operation,
                   const c10::Stream& stream)
    : operation_(std::move(operation)), end_(stream.device_type()) {
  const c10::AutoGradMode no_grad(false);
  operation_.wait(stream);
  const c10::StreamGuard current(stream);
  values_ = Offload::pinned(from.sizes(), from.strides(), dtype);
  values_.copy_(from.to(dtype), /*non_blocking=*/true);
  end_.record(stream);
}

// Autograd does not know it as a view: see parallel::view_like().
at::Tensor HostCopy::part(const at::Tensor& part) const {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return values_.as_strided(part.sizes(), part.strides(), part.storage_offset());
}

void HostCopy::order() const { end_.block(CudaDevices::current_stream(end_.device())); }

void HostCopy::wait() {
  operation_.synchronize(kNoTimeout);
  end_.synchronize();
}

at::Tensor Offload::pinned(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::empty_strided(sizes, strides,
                           at::TensorOptions(dtype).device(at::kCPU).pinned_memory(true));
}

Offload::Streams& Offload::streams_of(c10::Device gpu) {
  const auto found =
      std::ranges::find(streams_, gpu, [](const Streams& one) { return one.in.device(); });
  if (found != streams_.end()) return *found;
  const auto streams = CudaDevices::pool_streams({gpu.index(), gpu.index()});
  return streams_.emplace_back(Streams{streams.front(), streams.back(), nullptr});
}

std::pair<c10::Stream, c10::Stream> Offload::streams_for(c10::Device gpu) {
  MutexLock lock(mutex_);
  const Streams& streams = streams_of(gpu);
  return {streams.in, streams.out};
}

void Offload::bring_in(c10::Device gpu, const std::function<void()>& read) {
  const c10::Stream in = streams_for(gpu).first;
  follow_current(in);
  const c10::StreamGuard current(in);
  read();
  MutexLock lock(mutex_);  // events replace each other in the order of the stream
  Streams& streams = streams_of(gpu);
  streams.read = std::make_shared<c10::Event>(gpu.type());
  streams.read->record(in);
}

void Offload::wait_until_read() {
  std::vector<std::shared_ptr<c10::Event>> reads;
  {
    MutexLock lock(mutex_);
    for (Streams& streams : streams_) {
      if (streams.read) reads.push_back(std::exchange(streams.read, nullptr));
    }
  }
  for (const auto& read : reads) read->synchronize();
}

std::shared_ptr<HostCopy> Offload::take_out(at::Tensor from, at::ScalarType dtype,
                                            const Work& operation) {
  auto copy = std::make_shared<HostCopy>(from, dtype, operation, streams_for(from.device()).second);
  MutexLock lock(mutex_);
  if (!copies_.empty()) copies_.back()->order();
  copies_.push_back(copy);
  leaving_ = std::move(from);
  return copy;
}

void Offload::wait() {
  wait_until_read();
  std::vector<std::shared_ptr<HostCopy>> copies;
  {
    MutexLock lock(mutex_);
    copies.swap(copies_);
  }
  for (const auto& copy : copies) copy->wait();
  MutexLock lock(mutex_);
  if (copies_.empty()) leaving_.reset();
}

void Offload::forget() {
  MutexLock lock(mutex_);
  if (!copies_.empty()) copies_.back()->order();
  copies_.clear();
  leaving_.reset();
}

}  // namespace weft::shard
