// SPDX-License-Identifier: Apache-2.0
// Stream memory operations: a stream waits until a 32-bit word has a value, or writes one. The
// GPU's front end executes them without a host thread or a kernel. The word is in device memory or
// in mapped pinned memory and is named by its device address, 4-byte aligned.
//
// The driver has three rules that no return code reports:
//   - CUDA does not see the order that a word creates. If the work that releases a wait is itself
//     on a stream, make the waiting stream first wait for that work's event. Otherwise the driver
//     may put both into one hardware queue in the wrong order, and they hang.
//   - A waiting stream may block the loading of kernels on the whole device. Call Library::preload
//     before the first wait.
//   - A wait for a value that is never written hangs its stream forever. Code that fails to do the
//     work must write the value all the same.
//
// Throws Unsupported on a device without these operations. Any thread may use them.
#pragma once

#include <cstdint>
#include <vector>

#include <weft/cuda/stream.h>

namespace weft::cuda {

// The condition that ends a wait.
enum class Compare : unsigned {
  // (int32_t)(*word - value) >= 0: the order of a counter that wraps around. So a word that only
  // counts up can serve one wait after another, and a late wait does not hang. Values 2^31 or more
  // apart compare the wrong way round.
  GreaterOrEqual = CU_STREAM_WAIT_VALUE_GEQ,
  Equal = CU_STREAM_WAIT_VALUE_EQ,
  AnyBit = CU_STREAM_WAIT_VALUE_AND,  // (*word & value) != 0
};

// RemoteWrites: the wait also makes the device see what a NIC wrote before it wrote the word
// (GPUDirect RDMA before compute capability 9.0). Unsupported if
// Device::Properties::flush_remote_writes is false.
enum class Flush { None, RemoteWrites };

// Makes work that is enqueued on the stream afterwards run only once the comparison is true.
void wait_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value,
                Compare compare = Compare::GreaterOrEqual, Flush flush = Flush::None);

// Writes the word when all work enqueued before has run. The writes of that work are visible to the
// whole system before the word is.
void write_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value);

// Several operations in one call of the driver, which runs them in the order in which they were
// added. The driver takes 255 at once. Larger batches are split, and another thread that enqueues
// on the stream may come in between.
class MemOpBatch {
 public:
  void wait(CUdeviceptr word, std::uint32_t value, Compare compare = Compare::GreaterOrEqual,
            Flush flush = Flush::None);
  void write(CUdeviceptr word, std::uint32_t value);

  std::size_t size() const { return operations_.size(); }
  // Enqueues all operations; may be called again. If the driver refuses a part, the error says how
  // many are enqueued.
  void submit(const StreamRef& stream) const;

 private:
  std::vector<CUstreamBatchMemOpParams> operations_;
  bool flushes_ = false;
};

}  // namespace weft::cuda
