// Stream memory operations: a stream waits until a 32-bit word has a value, or writes one. The
// GPU's front end does it; no host thread and no kernel takes part. The word lies in device memory
// or in mapped pinned memory and is named by its device address, 4-byte aligned.
//
// Three rules of the driver that no return code reports:
//   - The order that a word creates is invisible to CUDA. Where work that releases a wait is itself
//   on a stream, let the
//     waiting stream wait for that work's event first, or the two may be put into one hardware
//     queue in the wrong order and hang.
//   - A stream that waits may block the loading of kernels for the whole device: Library::preload
//   before the first wait.
//   - A wait for a value that never comes hangs its stream for ever, so who fails to do the work
//   writes the value all the
//     same.
//
// A device without these operations throws Unsupported. Usable from every thread.
#pragma once

#include <cstdint>
#include <vector>

#include <weft/cuda/stream.h>

namespace weft::cuda {

// When a wait is over.
enum class Compare : unsigned {
  // (int32_t)(*word - value) >= 0: the order of a counter that wraps around. A word that only
  // counts up can so serve one
  // wait after another, and nobody hangs who comes late. Values 2^31 or more apart compare the
  // wrong way round.
  GreaterOrEqual = CU_STREAM_WAIT_VALUE_GEQ,
  Equal = CU_STREAM_WAIT_VALUE_EQ,
  AnyBit = CU_STREAM_WAIT_VALUE_AND,  // (*word & value) != 0
};

// Whether a wait also makes the device see what a NIC wrote before it wrote the word (GPUDirect
// RDMA before compute capability 9.0). Unsupported where Device::Properties::flush_remote_writes is
// false.
enum class Flush { None, RemoteWrites };

// What is enqueued on the stream afterwards runs once the word compares.
void wait_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value,
                Compare compare = Compare::GreaterOrEqual, Flush flush = Flush::None);

// Writes the word when all that was enqueued before has run; its writes are visible to the whole
// system before the word is.
void write_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value);

// Several of them for the price of one call. Runs in the order in which they were added. The driver
// takes 255 at once; more are split, and another thread that enqueues on the stream meanwhile may
// come in between.
class MemOpBatch {
 public:
  void wait(CUdeviceptr word, std::uint32_t value, Compare compare = Compare::GreaterOrEqual,
            Flush flush = Flush::None);
  void write(CUdeviceptr word, std::uint32_t value);

  std::size_t size() const { return operations_.size(); }
  // Enqueues all of them; may be called again. If the driver refuses a part, the error says how
  // many are enqueued.
  void submit(const StreamRef& stream) const;

 private:
  std::vector<CUstreamBatchMemOpParams> operations_;
  bool flushes_ = false;
};

}  // namespace weft::cuda
