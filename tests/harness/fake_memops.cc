// SPDX-License-Identifier: Apache-2.0
// The fake driver's stream memory operations.
#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

bool compares(std::uint32_t word, std::uint32_t value, unsigned how) {
  switch (how & ~static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH)) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<std::int32_t>(word - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return word == value;
    case CU_STREAM_WAIT_VALUE_AND: return (word & value) != 0;
    default: return ~(word | value) != 0;
  }
}

}  // namespace

CUresult FakeState::check_word(CUdeviceptr word, CUstream stream) {
  if (!options.stream_mem_ops) return CUDA_ERROR_NOT_SUPPORTED;
  if (word % sizeof(std::uint32_t) != 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a memory operation on an unaligned word");
  return check_range(word, sizeof(std::uint32_t), "a memory operation", stream);
}

CUresult FakeState::enqueue_wait(CUstream stream, Function function, CUdeviceptr word,
                                 std::uint32_t value, unsigned flags) {
  const CUresult checked = check_word(word, stream);
  if (checked != CUDA_SUCCESS) return checked;
  if ((flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0 && !options.flush_remote_writes)
    return CUDA_ERROR_NOT_SUPPORTED;
  const auto use = [this, word] {
    std::lock_guard lock(mutex);
    return check_use(word, sizeof(std::uint32_t), "a stream waiting for a word");
  };
  const auto passes = [this, word, value, flags] {
    // `use` reports a word that was freed.
    if (allocation_of(word)->state != Allocation::State::Live) return true;
    return compares(__atomic_load_n(reinterpret_cast<const std::uint32_t*>(word), __ATOMIC_ACQUIRE),
                    value, flags);
  };
  return enqueue(stream, {function, std::string(name(function)) + " wait", use, passes});
}

CUresult FakeState::enqueue_write(CUstream stream, Function function, CUdeviceptr word,
                                  std::uint32_t value) {
  const CUresult checked = check_word(word, stream);
  if (checked != CUDA_SUCCESS) return checked;
  return enqueue(stream, {function, std::string(name(function)) + " write", [this, word, value] {
                            {
                              std::lock_guard lock(mutex);
                              const CUresult usable =
                                  check_use(word, sizeof(std::uint32_t), "a stream writing a word");
                              if (usable != CUDA_SUCCESS) return usable;
                            }
                            __atomic_store_n(reinterpret_cast<std::uint32_t*>(word), value,
                                             __ATOMIC_RELEASE);
                            return CUDA_SUCCESS;
                          }});
}

CUresult FakeState::stream_wait_value32(CUstream stream, CUdeviceptr word, cuuint32_t value,
                                        unsigned flags) {
  return enqueue_wait(stream, Function::stream_wait_value32, word, value, flags);
}

CUresult FakeState::stream_write_value32(CUstream stream, CUdeviceptr word, cuuint32_t value,
                                         unsigned) {
  return enqueue_write(stream, Function::stream_write_value32, word, value);
}

CUresult FakeState::stream_batch_mem_op(CUstream stream, unsigned count,
                                        CUstreamBatchMemOpParams* operations, unsigned) {
  if (count > 255)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a batch of more than 255 memory operations");
  for (unsigned i = 0; i < count; ++i) {
    const auto& operation = operations[i];
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
      result = enqueue_wait(stream, Function::stream_batch_mem_op, operation.waitValue.address,
                            operation.waitValue.value, operation.waitValue.flags);
    } else if (operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      result = enqueue_write(stream, Function::stream_batch_mem_op, operation.writeValue.address,
                             operation.writeValue.value);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace weft::harness
