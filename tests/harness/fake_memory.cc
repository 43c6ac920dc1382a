// SPDX-License-Identifier: Apache-2.0
// The fake driver's memory: every allocation has its own pages with a guard page after them, and
// becomes unreadable once freed.
#include <algorithm>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

constexpr std::size_t kAlignment = 256;  // the driver's alignment
constexpr int kNobodyWroteThis = 0xa5;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

Allocation* FakeState::allocate(Allocation::Kind kind, Allocation::State state,
                                FakeContext* context, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t room = round_up(bytes, kAlignment);
  const std::size_t usable = round_up(room, page);
  const bool is_hidden = options.is_out_of_reach && kind == Allocation::Kind::Device;
  const int file = is_hidden ? memfd_create("weft-fake-gpu", MFD_CLOEXEC) : -1;
  if (is_hidden && ftruncate(file, static_cast<off_t>(usable + page)) != 0) return nullptr;
  const auto map = [&](int protection) {
    const int flags = is_hidden ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(nullptr, usable + page, protection, flags, file, 0);
  };
  void* const mapping = map(is_hidden ? PROT_NONE : PROT_READ | PROT_WRITE);
  void* const seen = is_hidden ? map(PROT_READ | PROT_WRITE) : mapping;
  if (file >= 0) close(file);
  if (mapping == MAP_FAILED || seen == MAP_FAILED) return nullptr;
  mprotect(static_cast<std::byte*>(seen) + usable, page, PROT_NONE);
  const std::ptrdiff_t behind = static_cast<std::byte*>(seen) - static_cast<std::byte*>(mapping);
  // At the end of its pages, so that an overrun faults.
  std::byte* const data = static_cast<std::byte*>(mapping) + usable - room;
  std::memset(data + behind, kNobodyWroteThis, room);
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  return &(allocations[base] = {kind, state, context, base, bytes, false, mapping, usable + page,
                                behind, ++allocated});
}

// Reuses a freed allocation for a new one.
Allocation* FakeState::allocate_again(FakeContext* context, std::size_t bytes) {
  for (auto& [base, allocation] : allocations) {
    const bool fits = allocation.state == Allocation::State::Freed && allocation.shareable &&
                      allocation.bytes == bytes;
    if (!fits || allocation.context != context) continue;
    allocation.state = Allocation::State::Live;
    allocation.id = ++allocated;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (allocation.behind == 0)
      mprotect(allocation.mapping, allocation.mapping_bytes - page, PROT_READ | PROT_WRITE);
    return &allocation;
  }
  return nullptr;
}

std::byte* FakeState::behind(CUdeviceptr address) {
  const Allocation* const found = allocation_of(address);
  return reinterpret_cast<std::byte*>(address) + (found == nullptr ? 0 : found->behind);
}

// The addresses stay reserved until the driver ends, so that uses of them are recognised.
void FakeState::unmap(Allocation& allocation) {
  allocation.state = Allocation::State::Freed;
  madvise(allocation.mapping, allocation.mapping_bytes, MADV_DONTNEED);
  mprotect(allocation.mapping, allocation.mapping_bytes, PROT_NONE);
}

Allocation* FakeState::allocation_of(CUdeviceptr address) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return nullptr;
  Allocation& found = std::prev(after)->second;
  return address < found.base + std::max<std::size_t>(found.bytes, 1) ? &found : nullptr;
}

CUresult FakeState::check_range(CUdeviceptr address, std::size_t bytes, const char* what,
                                CUstream stream) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const on = find(stream, error);
  if (on == nullptr) return error;
  const Allocation* found = allocation_of(address);
  if (found == nullptr) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  std::string(what) + " at an address that was never allocated");
  }
  const CUdeviceptr end = address + bytes;
  for (;;) {
    const auto& users = found->users;
    const bool is_closed =
        found->mapped != 0 && found->state == Allocation::State::Live &&
        std::find(users.begin(), users.end(), on->context->device) == users.end();
    if (is_closed) {
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    std::string(what) +
                        " at an address that was mapped, but not for this GPU; "
                        "cuMemSetAccess");
    }
    const CUdeviceptr behind = found->base + found->bytes;
    if (end <= behind) return CUDA_SUCCESS;
    const Allocation* const next = found->mapped != 0 ? allocation_of(behind) : nullptr;
    if (next == nullptr || next->mapped == 0 || next->state != Allocation::State::Live) {
      return refuse(CUDA_ERROR_INVALID_VALUE, std::string(what) + " of " + std::to_string(bytes) +
                                                  " bytes runs over the end of " +
                                                  std::to_string(behind - found->base) +
                                                  " allocated ones");
    }
    found = next;
  }
}

CUresult FakeState::check_use(CUdeviceptr address, std::size_t bytes, const char* what) {
  const CUdeviceptr end = address + bytes;
  for (const Allocation* found = allocation_of(address); found != nullptr;) {
    if (found->state != Allocation::State::Live) {
      return refuse(
          CUDA_ERROR_ILLEGAL_ADDRESS,
          std::string(what) +
              (found->state == Allocation::State::Freed
                   ? ": the memory was freed before"
                   : ": its allocation has not been reached yet; wait for the stream that "
                     "allocated it"));
    }
    const CUdeviceptr behind = found->base + found->bytes;
    found = found->mapped != 0 && behind < end ? allocation_of(behind) : nullptr;
  }
  return CUDA_SUCCESS;
}

// --- pinned host memory

CUresult FakeState::mem_host_alloc(void** memory, std::size_t bytes, unsigned flags) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  ++host_blocks;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_MEMHOSTALLOC_PORTABLE) == 0 || (flags & CU_MEMHOSTALLOC_DEVICEMAP) == 0) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "pinned memory that is not portable and mapped");
  }
  const Allocation* const made =
      allocate(Allocation::Kind::Pinned, Allocation::State::Live, context, bytes);
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *memory = reinterpret_cast<void*>(made->base);
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_free_host(void* memory) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  Allocation* const found = allocation_of(address_of(memory));
  if (found == nullptr || found->base != address_of(memory) ||
      found->kind != Allocation::Kind::Pinned || found->state != Allocation::State::Live) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "pinned memory was freed that is not allocated");
  }
  const CUresult waited =
      block_until([this, context] { return idle(*context); }, *context, Function::mem_free_host);
  if (waited == CUDA_SUCCESS) unmap(*found);
  return waited;
}

CUresult FakeState::mem_host_get_device_pointer(CUdeviceptr* address, void* memory, unsigned) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const Allocation* const found = allocation_of(address_of(memory));
  if (found == nullptr || found->kind != Allocation::Kind::Pinned) return CUDA_ERROR_INVALID_VALUE;
  *address = address_of(memory);
  return CUDA_SUCCESS;
}

CUresult FakeState::pointer_get_attribute(void* value, CUpointer_attribute attribute,
                                          CUdeviceptr address) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE &&
      attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "the fake driver knows no pointer attribute " + std::to_string(attribute));
  }
  const Allocation* const found = allocation_of(address);
  if (found == nullptr || found->state == Allocation::State::Freed) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) {
    std::memcpy(value, &found->id, sizeof found->id);
    return CUDA_SUCCESS;
  }
  const unsigned type =
      found->kind == Allocation::Kind::Device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  std::memcpy(value, &type, sizeof type);
  return CUDA_SUCCESS;
}

// --- device memory

CUresult FakeState::allocate_async(CUdeviceptr* address, std::size_t bytes, CUstream stream,
                                   Function function) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const found = find(stream, error);
  if (found == nullptr) return error;
  if (!options.memory_pools) return CUDA_ERROR_NOT_SUPPORTED;
  if (found->capture)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "the fake driver captures no allocations");
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::size_t taken = 0;
  for (const auto& [base, other] : allocations) {
    const bool here = other.kind == Allocation::Kind::Device && other.context == found->context;
    if (here && other.state != Allocation::State::Freed) taken += other.bytes;
  }
  if (taken + bytes > options.device_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  Allocation* const made =
      allocate(Allocation::Kind::Device, Allocation::State::Coming, found->context, bytes);
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = made->base;
  return enqueue(stream, {function, name(function), [this, base = made->base] {
                            std::lock_guard lock(mutex);
                            allocations.at(base).state = Allocation::State::Live;
                            return CUDA_SUCCESS;
                          }});
}

CUresult FakeState::mem_alloc_async(CUdeviceptr* address, std::size_t bytes, CUstream stream) {
  return allocate_async(address, bytes, stream, Function::mem_alloc_async);
}

CUresult FakeState::mem_alloc_from_pool_async(CUdeviceptr* address, std::size_t bytes,
                                              CUmemoryPool handle, CUstream stream) {
  const FakePool* const pool = object_of(pools, handle);
  if (pool == nullptr || pool->destroyed)
    return refuse(CUDA_ERROR_INVALID_VALUE, "memory from a pool that is not there");
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const found = find(stream, error);
  if (found == nullptr) return error;
  if (found->context->device != pool->device) return CUDA_ERROR_INVALID_VALUE;
  return allocate_async(address, bytes, stream, Function::mem_alloc_from_pool_async);
}

CUresult FakeState::mem_free_async(CUdeviceptr address, CUstream stream) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const on = find(stream, error);
  if (on == nullptr) return error;
  if (on->capture)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "the fake driver captures no freeing of memory");
  Allocation* const found = allocation_of(address);
  if (found == nullptr || found->base != address || found->kind != Allocation::Kind::Device ||
      found->mapped != 0 || found->state == Allocation::State::Freed || found->freeing) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "device memory was freed that is not allocated, or freed twice");
  }
  found->freeing = true;
  return enqueue(stream,
                 {Function::mem_free_async, name(Function::mem_free_async), [this, address] {
                    std::lock_guard lock(mutex);
                    const CUresult usable = check_use(address, 1, "freeing device memory");
                    if (usable == CUDA_SUCCESS) unmap(allocations.at(address));
                    return usable;
                  }});
}

CUresult FakeState::mem_pool_create(CUmemoryPool* pool, const CUmemPoolProps* properties) {
  if (!options.memory_pools) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties->location.id >= options.devices) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto& made = pools.emplace_back(std::make_unique<FakePool>());
  made->device = properties->location.id;
  *pool = handle_of<CUmemoryPool>(made.get());
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_pool_destroy(CUmemoryPool handle) {
  FakePool* const pool = object_of(pools, handle);
  if (pool == nullptr || pool->destroyed)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a pool was destroyed that is not there");
  pool->destroyed = true;  // its allocations stay valid
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_pool_set_attribute(CUmemoryPool handle, CUmemPool_attribute, void*) {
  const FakePool* const pool = object_of(pools, handle);
  return pool == nullptr || pool->destroyed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// --- copies

CUresult FakeState::memcpy_async(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                 CUstream stream) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const found = find(stream, error);
  if (found == nullptr) return error;
  const bool pageable = allocation_of(to) == nullptr || allocation_of(from) == nullptr;
  for (const CUdeviceptr address : {to, from}) {
    // Memory that the driver does not know is pageable.
    if (allocation_of(address) == nullptr) continue;
    const CUresult checked = check_range(address, bytes, "a copy", stream);
    if (checked != CUDA_SUCCESS) return checked;
  }
  const auto run = [this, to, from, bytes] {
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    {
      std::lock_guard lock(mutex);
      target = behind(to);
      source = behind(from);
      for (const CUdeviceptr address : {to, from}) {
        const CUresult usable = check_use(address, bytes, "a copy");
        if (usable != CUDA_SUCCESS) return usable;
      }
    }
    std::memmove(target, source, bytes);
    return CUDA_SUCCESS;
  };
  const CUresult result =
      enqueue(stream, {Function::memcpy_async, name(Function::memcpy_async), run});
  if (result != CUDA_SUCCESS || !pageable) return result;
  // The driver stages pageable memory itself and makes the host wait for that.
  const auto target = found->enqueued;
  return block_until([found, target] { return found->finished >= target; }, *found->context,
                     Function::memcpy_async);
}

CUresult FakeState::memset_d8_async(CUdeviceptr address, unsigned char byte, std::size_t bytes,
                                    CUstream stream) {
  const CUresult checked = check_range(address, bytes, "a fill", stream);
  if (checked != CUDA_SUCCESS) return checked;
  return enqueue(stream, {Function::memset_d8_async, name(Function::memset_d8_async),
                          [this, address, byte, bytes] {
                            std::byte* target = nullptr;
                            {
                              std::lock_guard lock(mutex);
                              target = behind(address);
                              const CUresult usable = check_use(address, bytes, "a fill");
                              if (usable != CUDA_SUCCESS) return usable;
                            }
                            std::memset(target, byte, bytes);
                            return CUDA_SUCCESS;
                          }});
}

}  // namespace weft::harness
