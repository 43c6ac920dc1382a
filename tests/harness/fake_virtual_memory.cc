// SPDX-License-Identifier: Apache-2.0
// The fake driver's virtual memory: cuMemCreate makes a file in memory, which is mapped at reserved
// addresses. An exported descriptor is that file's, so it opens the same bytes wherever it is
// passed.
#include <algorithm>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

constexpr std::size_t kGranularity = 2 << 20;  // the granularity of GPUs; the files are sparse

std::pair<std::uint64_t, std::uint64_t> file_of(int descriptor) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0) return {0, 0};
  return {about.st_dev, about.st_ino};
}

void* map_at(CUdeviceptr address, std::size_t bytes, int protection, int file) {
  const int flags =
      MAP_FIXED | (file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
  return ::mmap(reinterpret_cast<void*>(address), bytes, protection, flags, file, 0);
}

}  // namespace

// --- handles

FakeHandle* FakeState::find_handle(CUmemGenericAllocationHandle handle) {
  if (handle == 0 || handle > handles.size()) return nullptr;
  FakeHandle& found = handles[handle - 1];
  return found.memory == nullptr || found.references == 0 ? nullptr : &found;
}

// Gives out the lowest free number, so that a number that is no longer held soon stands for other
// memory.
CUmemGenericAllocationHandle FakeState::give_handle(const FakePhysical* memory, int file) {
  std::size_t place = 0;
  while (place < handles.size() && handles[place].memory != nullptr) ++place;
  if (place == handles.size()) handles.emplace_back();
  handles[place] = {memory, file, 1, 0};
  return place + 1;
}

void FakeState::drop_if_unused(FakeHandle& handle) {
  if (handle.references > 0 || handle.mappings > 0) return;
  ::close(handle.file);
  handle = {};
}

CUresult FakeState::mem_create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                               const CUmemAllocationProp* properties, unsigned long long flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const int device = properties->location.id;
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 ||
      device >= options.devices || flags != 0 || bytes == 0 || bytes % kGranularity != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "memory was created that the fake driver does not know, or of an odd size");
  }
  const auto types = properties->requestedHandleTypes;
  if (types != CU_MEM_HANDLE_TYPE_NONE && types != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (bytes > options.device_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = ::memfd_create("weft-fake-gpu", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  physical.push_back(std::make_unique<FakePhysical>(FakePhysical{
      device, bytes, types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, file_of(file)}));
  *handle = give_handle(physical.back().get(), file);
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_release(CUmemGenericAllocationHandle handle) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  FakeHandle* const found = find_handle(handle);
  if (found == nullptr)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a handle of memory was released that nobody holds");
  --found->references;
  drop_if_unused(*found);
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_retain_allocation_handle(CUmemGenericAllocationHandle* handle,
                                                 void* address) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const Allocation* const found = allocation_of(reinterpret_cast<CUdeviceptr>(address));
  if (found == nullptr || found->mapped == 0 || found->state != Allocation::State::Live)
    return CUDA_ERROR_INVALID_VALUE;
  ++handles[found->mapped - 1].references;
  *handle = found->mapped;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_export_to_shareable_handle(void* exported,
                                                   CUmemGenericAllocationHandle handle,
                                                   CUmemAllocationHandleType type,
                                                   unsigned long long flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const FakeHandle* const found = find_handle(handle);
  if (found == nullptr)
    return refuse(CUDA_ERROR_INVALID_VALUE, "memory was exported by a handle that nobody holds");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0 ||
      !found->memory->exportable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int descriptor = ::fcntl(found->file, F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(exported, &descriptor, sizeof descriptor);
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_import_from_shareable_handle(CUmemGenericAllocationHandle* handle,
                                                     void* exported,
                                                     CUmemAllocationHandleType type) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int descriptor = static_cast<int>(reinterpret_cast<std::intptr_t>(exported));
  const auto is_it = [file = file_of(descriptor)](const auto& memory) {
    return memory->file == file;
  };
  const auto memory = std::find_if(physical.rbegin(), physical.rend(), is_it);
  if (memory == physical.rend()) return CUDA_ERROR_UNKNOWN;  // as the driver does, which continues
  const int own = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *handle = give_handle(memory->get(), own);
  return CUDA_SUCCESS;
}

// --- addresses

FakeReservation* FakeState::reservation_of(CUdeviceptr address, std::size_t bytes,
                                           CUdeviceptr& base) {
  auto after = reservations.upper_bound(address);
  if (after == reservations.begin()) return nullptr;
  auto& [begin, found] = *std::prev(after);
  base = begin;
  return found.freed || bytes > found.bytes || address - begin > found.bytes - bytes ? nullptr
                                                                                     : &found;
}

std::vector<Allocation*> FakeState::mapped_in(CUdeviceptr address, std::size_t bytes) {
  std::vector<Allocation*> found;
  for (auto at = allocations.lower_bound(address);
       at != allocations.end() && at->first < address + bytes; ++at) {
    if (at->second.mapped != 0 && at->second.state == Allocation::State::Live)
      found.push_back(&at->second);
  }
  return found;
}

CUresult FakeState::mem_address_reserve(CUdeviceptr* address, std::size_t bytes,
                                        std::size_t alignment, CUdeviceptr hint,
                                        unsigned long long flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (alignment > kGranularity || hint != 0 || flags != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "addresses were reserved in a way that the fake driver does not know");
  }
  if (bytes == 0 || bytes % page != 0) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [base, reservation] : reservations) {
    if (!options.reuses_addresses || !reservation.freed || reservation.bytes != bytes) continue;
    reservation.freed = false;
    *address = base;
    return CUDA_SUCCESS;
  }
  // Reserves room for alignment, and a page at the end that is never mapped.
  const auto reserve = [&]() -> CUdeviceptr {
    if (bytes > SIZE_MAX - kGranularity - page) return 0;
    void* const room = ::mmap(nullptr, bytes + kGranularity + page, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return 0;
    return (reinterpret_cast<CUdeviceptr>(room) + kGranularity - 1) / kGranularity * kGranularity;
  };
  const CUdeviceptr base = reserve();
  const CUdeviceptr seen = options.is_out_of_reach && base != 0 ? reserve() : base;
  if (base == 0 || seen == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  reservations[base] = {bytes, false, static_cast<std::ptrdiff_t>(seen - base)};
  *address = base;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_address_free(CUdeviceptr address, std::size_t bytes) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const auto found = reservations.find(address);
  if (found == reservations.end() || found->second.freed || found->second.bytes != bytes) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "addresses were freed that are not a reservation of this size");
  }
  if (!mapped_in(address, bytes).empty()) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "addresses were freed with memory mapped to them");
  }
  found->second.freed = true;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                            CUmemGenericAllocationHandle handle, unsigned long long flags) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  FakeHandle* const found = find_handle(handle);
  if (found == nullptr)
    return refuse(CUDA_ERROR_INVALID_VALUE, "memory was mapped by a handle that nobody holds");
  CUdeviceptr reserved = 0;
  const FakeReservation* const reservation = reservation_of(address, bytes, reserved);
  if (reservation == nullptr || address % kGranularity != 0 || offset != 0 || flags != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "memory was mapped to addresses that are not reserved, or to odd ones");
  }
  const Allocation* const before = allocation_of(address);
  const bool is_taken =
      before != nullptr && before->mapped != 0 && before->state == Allocation::State::Live;
  if (is_taken || !mapped_in(address, bytes).empty()) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "memory was mapped over other memory");
  }
  // No complaint, because the size may come from a peer.
  if (bytes == 0 || bytes % kGranularity != 0 || bytes > found->memory->bytes)
    return CUDA_ERROR_INVALID_VALUE;
  const bool is_hidden = reservation->behind != 0;
  const CUdeviceptr seen = address + static_cast<CUdeviceptr>(reservation->behind);
  if (map_at(seen, bytes, is_hidden ? PROT_READ | PROT_WRITE : PROT_NONE, found->file) ==
      MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // Forgets memory that was unmapped here before, because it cannot be told apart from this memory
  // any more.
  std::erase_if(allocations, [&](const auto& entry) {
    return entry.first < address + bytes && entry.first + entry.second.bytes > address &&
           entry.second.mapped != 0;
  });
  Allocation made{};
  made.kind = Allocation::Kind::Device;
  made.state = Allocation::State::Live;
  made.base = address;
  made.bytes = made.mapping_bytes = bytes;
  made.mapping = reinterpret_cast<void*>(address);
  made.behind = reservation->behind;
  made.id = ++allocated;
  made.mapped = handle;
  allocations[address] = made;
  ++found->mappings;
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_unmap(CUdeviceptr address, std::size_t bytes) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  const auto is_it = [&](const Allocation* one) {
    return one->base == address && one->bytes == bytes;
  };
  const auto found = mapped_in(address, bytes);
  if (found.size() != 1 || !is_it(found[0])) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "memory was unmapped that is not one mapping of this size");
  }
  const auto is_idle = [this] {
    return std::all_of(primary.begin(), primary.end(),
                       [this](const FakeContext* one) { return one == nullptr || idle(*one); });
  };
  const CUresult waited = block_until(is_idle, *context, Function::mem_unmap);
  if (waited != CUDA_SUCCESS) return waited;
  map_at(address + static_cast<CUdeviceptr>(found[0]->behind), bytes, PROT_NONE, -1);
  found[0]->state = Allocation::State::Freed;
  FakeHandle& handle = handles[found[0]->mapped - 1];
  --handle.mappings;
  drop_if_unused(handle);
  return CUDA_SUCCESS;
}

CUresult FakeState::mem_set_access(CUdeviceptr address, std::size_t bytes,
                                   const CUmemAccessDesc* users, std::size_t count) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const auto found = mapped_in(address, bytes);
  std::size_t covered = 0;
  for (const Allocation* one : found) covered += one->bytes;
  if (bytes == 0 || covered != bytes) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "access was set where not all addresses are mapped, or a part of what is");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemLocation& user = users[i].location;
    if (user.type != CU_MEM_LOCATION_TYPE_DEVICE || user.id < 0 || user.id >= options.devices ||
        users[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return refuse(CUDA_ERROR_INVALID_VALUE, "access was set that the fake driver does not know");
    }
    for (Allocation* one : found) {
      const bool is_own = handles[one->mapped - 1].memory->device == user.id;
      if (!is_own && !options.peer_access) return CUDA_ERROR_INVALID_DEVICE;
      one->users.push_back(user.id);
    }
  }
  for (const Allocation* one : found) {
    if (one->behind == 0) ::mprotect(one->mapping, one->bytes, PROT_READ | PROT_WRITE);
  }
  return CUDA_SUCCESS;
}

}  // namespace weft::harness
