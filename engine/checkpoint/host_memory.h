// SPDX-License-Identifier: Apache-2.0
// Host memory for the copies of values that a checkpoint writes. Internal.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include <weft/base/mutex.h>

namespace weft::checkpoint {

// Bytes on the host, not cleared, that begin at a page, as NewFile needs them. They go back to the
// system when the tensor is freed. Throws Busy without memory.
at::Tensor paged_bytes(std::uint64_t bytes);
// The same for the value of a tensor. Small ones come from libtorch's allocator.
at::Tensor paged_tensor(at::IntArrayRef sizes, c10::ScalarType dtype);

// The memory of a save that has ended. The next save takes it while the Saving that owns it lives:
// to touch fresh memory takes several times as long as to copy into it. Usable from every thread.
class KeptBytes {
 public:
  static std::shared_ptr<KeptBytes> make();
  // Pinned memory is not kept, because libtorch does so.
  void keep(at::Tensor memory);
  // Memory that some KeptBytes of this process has, and of which a save of so many bytes leaves
  // little unused. Returns an undefined tensor if no KeptBytes has such memory.
  static at::Tensor take(std::uint64_t bytes);

 private:
  at::Tensor take_if(std::uint64_t bytes);

  Mutex mutex_;
  at::Tensor memory_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::checkpoint
