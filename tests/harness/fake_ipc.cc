// SPDX-License-Identifier: Apache-2.0
// The fake driver's sharing between processes. There is only one process, which may be allowed to
// act as both.
#include <algorithm>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

template <class Handle>
void put(Handle& handle, std::uint64_t number, std::uint64_t check) {
  std::memset(&handle, 0, sizeof handle);
  std::memcpy(handle.reserved, &number, sizeof number);
  std::memcpy(handle.reserved + sizeof number, &check, sizeof check);
}

template <class Handle>
std::pair<std::uint64_t, std::uint64_t> get(const Handle& handle) {
  std::uint64_t numbers[2];
  std::memcpy(numbers, handle.reserved, sizeof numbers);
  return {numbers[0], numbers[1]};
}

}  // namespace

CUresult FakeState::device_get_uuid(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(device + 1);
  const pid_t process = getpid();  // devices of another process's driver are different ones
  std::memcpy(uuid->bytes + 4, &process, sizeof process);
  return CUDA_SUCCESS;
}

CUresult FakeState::device_can_access_peer(int* can, CUdevice device, CUdevice peer) {
  *can = options.peer_access && device != peer;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_alloc(CUdeviceptr* address, std::size_t bytes) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  ++host_blocks;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Allocation* made = options.reuses_addresses ? allocate_again(context, bytes) : nullptr;
  if (made == nullptr)
    made = allocate(Allocation::Kind::Device, Allocation::State::Live, context, bytes);
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  made->shareable = true;
  *address = made->base;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_free(CUdeviceptr address) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  Allocation* const found = allocation_of(address);
  if (found == nullptr || found->base != address || !found->shareable ||
      found->state != Allocation::State::Live) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "device memory was freed that is not allocated, or not by cuMemAlloc");
  }
  const CUresult waited =
      block_until([this, context] { return idle(*context); }, *context, Function::mem_free);
  // Stricter than the driver, which keeps the memory alive where it is open.
  if (waited == CUDA_SUCCESS) unmap(*found);
  return waited;
}

CUresult FakeState::mem_get_address_range(CUdeviceptr* base, std::size_t* bytes,
                                          CUdeviceptr address) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const Allocation* const found = allocation_of(address);
  if (found == nullptr || found->state == Allocation::State::Freed ||
      found->kind != Allocation::Kind::Device) {
    return CUDA_ERROR_NOT_FOUND;
  }
  if (base != nullptr) *base = found->base;
  if (bytes != nullptr) *bytes = found->bytes;
  return CUDA_SUCCESS;
}

CUresult FakeState::ipc_get_mem_handle(CUipcMemHandle* handle, CUdeviceptr address) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const Allocation* const found = allocation_of(address);
  if (found == nullptr || found->state != Allocation::State::Live || !found->shareable)
    return CUDA_ERROR_INVALID_VALUE;
  put(*handle, found->base, found->id);
  return CUDA_SUCCESS;
}

CUresult FakeState::ipc_open_mem_handle(CUdeviceptr* address, CUipcMemHandle handle,
                                        unsigned flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  if (!options.is_two_processes) return CUDA_ERROR_INVALID_CONTEXT;  // this process made the memory
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  const auto [base, id] = get(handle);
  const auto found = allocations.find(base);
  if (found == allocations.end() || found->second.id != id) return CUDA_ERROR_INVALID_VALUE;
  if (found->second.state != Allocation::State::Live) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "memory was opened by its handle after it was freed");
  }
  ++found->second.opened;
  *address = base;
  return CUDA_SUCCESS;
}

CUresult FakeState::ipc_close_mem_handle(CUdeviceptr address) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  Allocation* const found = allocation_of(address);
  if (found == nullptr || found->base != address || found->opened == 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "shared memory was closed that is not open");
  }
  const CUresult waited = block_until([this, context] { return idle(*context); }, *context,
                                      Function::ipc_close_mem_handle);
  if (waited == CUDA_SUCCESS) --found->opened;
  return waited;
}

CUresult FakeState::ipc_get_event_handle(CUipcEventHandle* handle, CUevent native) {
  CUresult error = CUDA_SUCCESS;
  const FakeEvent* const event = find(native, error);
  if (event == nullptr) return error;
  if (!event->interprocess)
    return refuse(CUDA_ERROR_INVALID_VALUE, "an event was shared that was not made for it");
  put(*handle, reinterpret_cast<std::uintptr_t>(event), 0);
  return CUDA_SUCCESS;
}

CUresult FakeState::ipc_open_event_handle(CUevent* native, CUipcEventHandle handle) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  if (!options.is_two_processes) return CUDA_ERROR_INVALID_CONTEXT;
  FakeEvent* const original = object_of(events, reinterpret_cast<void*>(get(handle).first));
  if (original == nullptr || original->destroyed || !original->interprocess)
    return CUDA_ERROR_INVALID_HANDLE;
  auto& made = events.emplace_back(std::make_unique<FakeEvent>());
  made->context = context;
  made->original = original;
  *native = handle_of<CUevent>(made.get());
  return CUDA_SUCCESS;
}

// --- memory for NICs

// The descriptor's file says where the memory is, for the fake NIC.
CUresult FakeState::mem_get_handle_for_address_range(void* handle, CUdeviceptr address,
                                                     std::size_t bytes, CUmemRangeHandleType type,
                                                     unsigned long long flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags != 0 || address % page != 0 ||
      bytes == 0 || bytes % page != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "a dma-buf of memory that is not whole pages");
  }
  if (!options.dma_buf) return CUDA_ERROR_NOT_SUPPORTED;
  const auto covers = [&](const auto& entry) {
    const auto begin = reinterpret_cast<std::uintptr_t>(entry.second.mapping);
    return entry.second.kind == Allocation::Kind::Device &&
           entry.second.state == Allocation::State::Live && address >= begin &&
           address + bytes <= begin + entry.second.mapping_bytes;
  };
  if (std::none_of(allocations.begin(), allocations.end(), covers)) return CUDA_ERROR_INVALID_VALUE;
  const int file = ::memfd_create("weft-fake-dma-buf", MFD_CLOEXEC);
  const std::uint64_t where[2] = {address, bytes};
  if (file < 0 || ::pwrite(file, where, sizeof where, 0) != sizeof where)
    return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(handle, &file, sizeof file);
  return CUDA_SUCCESS;
}

CUresult FakeState::flush_gpu_direct_rdma_writes(CUflushGPUDirectRDMAWritesTarget target,
                                                 CUflushGPUDirectRDMAWritesScope scope) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  if (!options.host_flushes) return CUDA_ERROR_NOT_SUPPORTED;
  const bool is_known = target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX &&
                        scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
  return is_known ? CUDA_SUCCESS
                  : refuse(CUDA_ERROR_INVALID_VALUE, "a flush that the fake driver does not know");
}

}  // namespace weft::harness
