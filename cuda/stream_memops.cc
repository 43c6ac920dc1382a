// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include <weft/cuda/stream_memops.h>

namespace weft::cuda {

namespace {

constexpr std::size_t kLargestBatch = 255;

unsigned flags_of(Compare compare, Flush flush) {
  const unsigned flushing = CU_STREAM_WAIT_VALUE_FLUSH;
  return static_cast<unsigned>(compare) | (flush == Flush::RemoteWrites ? flushing : 0u);
}

std::string text_of(const Device& device) {
  return describe(device.id()) + " (" + device.properties().name + ")";
}

void require_flush(const Device& device) {
  if (!device.properties().flush_remote_writes) {
    throw Error(Blame::Unsupported,
                text_of(device) +
                    " cannot flush remote writes in a wait; compute capability 9.0 needs no "
                    "flush, older devices read once from their NIC");
  }
}

// The driver's "not supported" does not say what is missing or what to do.
void check(const StreamRef& stream, CUresult result, std::string_view what) {
  if (result == CUDA_ERROR_NOT_SUPPORTED) {
    throw Error(Blame::Unsupported,
                std::string(what) + ": " + text_of(stream.device()) +
                    " has no stream memory operations; use fences of events instead",
                result);
  }
  stream.device().check(result, what);
}

}  // namespace

void wait_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value, Compare compare,
                Flush flush) {
  if (flush == Flush::RemoteWrites) require_flush(stream.device());
  DeviceGuard guard(stream.device());
  check(stream,
        stream.driver().stream_wait_value32(stream.native(), word, value, flags_of(compare, flush)),
        "cuStreamWaitValue32");
}

void write_value(const StreamRef& stream, CUdeviceptr word, std::uint32_t value) {
  DeviceGuard guard(stream.device());
  check(stream,
        stream.driver().stream_write_value32(stream.native(), word, value,
                                             CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
}

void MemOpBatch::wait(CUdeviceptr word, std::uint32_t value, Compare compare, Flush flush) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = word;
  operation.waitValue.value = value;
  operation.waitValue.flags = flags_of(compare, flush);
  operations_.push_back(operation);
  flushes_ = flushes_ || flush == Flush::RemoteWrites;
}

void MemOpBatch::write(CUdeviceptr word, std::uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = word;
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  operations_.push_back(operation);
}

void MemOpBatch::submit(const StreamRef& stream) const {
  if (flushes_) require_flush(stream.device());
  DeviceGuard guard(stream.device());
  for (std::size_t done = 0; done < operations_.size();) {
    const std::size_t count = std::min(kLargestBatch, operations_.size() - done);
    // The driver takes the operations as non-const and writes to one of their fields.
    std::vector<CUstreamBatchMemOpParams> part(
        operations_.begin() + static_cast<std::ptrdiff_t>(done),
        operations_.begin() + static_cast<std::ptrdiff_t>(done + count));
    const CUresult result = stream.driver().stream_batch_mem_op(
        stream.native(), static_cast<unsigned>(count), part.data(), 0);
    if (result != CUDA_SUCCESS) {
      check(stream, result,
            "cuStreamBatchMemOp (" + std::to_string(done) + " of " +
                std::to_string(operations_.size()) + " are enqueued)");
    }
    done += count;
  }
}

}  // namespace weft::cuda
