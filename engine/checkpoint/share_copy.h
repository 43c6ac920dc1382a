// SPDX-License-Identifier: Apache-2.0
// The copy of one rank's share of the values: the program's thread copies, while another already
// writes what has been copied. Both own it. Internal.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Event.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/shares.h>

namespace weft::checkpoint {

class ShareCopy {
 public:
  // Makes memory, pinned if some values come from a GPU, or takes that of an earlier save. Throws
  // Busy without memory.
  explicit ShareCopy(Share share);

  // On the program's thread, once: copies the values. Copies from a GPU are enqueued on the current
  // streams. wait_for() throws what goes wrong.
  void run();

  // The functions below are for the threads that write.

  // Blocks until the first `bytes` of data() are those of the values. Throws why they never will
  // be.
  void wait_for(std::uint64_t bytes);
  const std::vector<SavedSlice>& slices() const { return share_.slices; }
  std::uint64_t bytes() const { return share_.bytes; }
  const void* data() const { return memory_.const_data_ptr(); }
  // The memory, which nobody may use for this copy any more.
  at::Tensor take_memory() { return std::move(memory_); }

 private:
  void copy();

  Share share_;
  at::Tensor memory_;
  std::vector<c10::Event> copies_;  // from GPUs; written before copied_
  std::once_flag arrived_;          // of the copies from GPUs
  std::optional<Error> failure_;    // written before copied_
  // How much of the memory has been copied, or kAll: all, or none after a failure.
  std::atomic<std::uint64_t> copied_ = 0;
};

}  // namespace weft::checkpoint
