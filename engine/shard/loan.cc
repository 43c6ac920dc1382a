// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <weft/base/mutex.h>
#include <weft/engine/shard/loan.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::shard {

// Shared with the operation, which may drop its part on another thread.
struct Loan::Held {
  explicit Held(at::Tensor lent) : memory_(std::move(lent)) {}
  void give_back() {
    at::Tensor memory;  // freed without the lock
    MutexLock lock(mutex_);
    std::swap(memory, memory_);
  }

 private:
  Mutex mutex_;
  at::Tensor memory_ WEFT_GUARDED_BY(mutex_);
};

at::Tensor Loan::lend(const at::Tensor& memory) {
  if (memory.is_cpu() || memory.numel() == 0) return memory;
  const c10::AutoGradMode no_grad(false);
  const c10::Stream stream = tensor::CudaDevices::current_stream(memory.device());
  if (std::ranges::find(streams_, stream) == streams_.end()) streams_.push_back(stream);
  held_.push_back(std::make_shared<Held>(memory));
  using Owner = std::shared_ptr<Held>;
  at::DataPtr data(
      memory.storage().mutable_data(), new Owner(held_.back()),
      [](void* owner) { delete static_cast<Owner*>(owner); }, memory.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), memory.storage().nbytes(),
                             std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, memory.options().requires_grad(false))
      .set_(storage, memory.storage_offset(), memory.sizes(), memory.strides());
}

void Loan::end_behind(Work& work, bool current_waits) noexcept {
  try {
    for (const c10::Stream& stream : streams_) {
      const bool waits =
          current_waits && stream == tensor::CudaDevices::current_stream(stream.device());
      if (!waits) work.wait(stream);
    }
  } catch (const std::exception&) {
    held_.clear();  // the group reports the failure
  }
  end();
}

void Loan::end() noexcept {
  for (const auto& held : std::exchange(held_, {})) held->give_back();
  streams_.clear();
}

}  // namespace weft::shard
