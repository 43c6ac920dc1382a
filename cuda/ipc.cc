// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>

#include <weft/base/log.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/retire.h>

namespace weft::cuda {

namespace {

CUdevice native_of(Device& device) {
  CUdevice native = 0;
  device.check(device.driver().device_get(&native, device.index()), "cuDeviceGet");
  return native;
}

template <class Native>
IpcHandle bytes_of(const Native& native) {
  IpcHandle handle;
  static_assert(sizeof native == sizeof handle);
  std::memcpy(handle.data(), &native, sizeof native);
  return handle;
}

template <class Native>
Native native_of(const IpcHandle& handle) {
  Native native;
  static_assert(sizeof native == sizeof handle);
  std::memcpy(&native, handle.data(), sizeof native);
  return native;
}

Uuid uuid_of(Device& device, CUdevice native) {
  CUuuid bytes{};
  device.check(device.driver().device_get_uuid(&bytes, native), "cuDeviceGetUuid");
  Uuid uuid;
  static_assert(sizeof bytes == sizeof uuid);
  std::memcpy(uuid.data(), &bytes, sizeof bytes);
  return uuid;
}

}  // namespace

Uuid uuid_of(Device& device) { return uuid_of(device, native_of(device)); }

bool can_read(Device& reader, const Uuid& uuid) {
  const Driver& driver = reader.driver();
  const CUdevice own = native_of(reader);
  int count = 0;
  reader.check(driver.device_get_count(&count), "cuDeviceGetCount");
  for (int index = 0; index < count; ++index) {
    CUdevice other = 0;
    reader.check(driver.device_get(&other, index), "cuDeviceGet");
    if (uuid_of(reader, other) != uuid) continue;
    int can = 1;
    if (other != own)
      reader.check(driver.device_can_access_peer(&can, own, other), "cuDeviceCanAccessPeer");
    return can != 0;
  }
  return false;
}

ShareableMemory::ShareableMemory(Device& device, std::size_t bytes)
    : device_(device.shared_from_this()), bytes_(bytes) {
  if (bytes == 0) return;
  DeviceGuard guard(device);
  RelaxedCapture relaxed(device.driver());
  device.check(device.driver().mem_alloc(&address_, bytes),
               "cuMemAlloc of " + std::to_string(bytes) + " bytes");
}

ShareableMemory::~ShareableMemory() {
  if (address_ == 0) return;
  device_->retirement().retire(Fence(), [&device = *device_, address = address_] {
    if (device.is_lost()) return;
    DeviceGuard guard(device);
    RelaxedCapture relaxed(device.driver());
    device.check(device.driver().mem_free(address), "cuMemFree");
  });
}

Slice ShareableMemory::slice() const {
  return {reinterpret_cast<void*>(address_), bytes_, device_->id()};
}

AllocationRange allocation_of(Device& device, CUdeviceptr address) {
  DeviceGuard guard(device);
  const RelaxedCapture relaxed(device.driver());
  AllocationRange range;
  device.check(device.driver().mem_get_address_range(&range.base, &range.bytes, address),
               "cuMemGetAddressRange");
  unsigned long long id = 0;
  device.check(device.driver().pointer_get_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address),
               "cuPointerGetAttribute(BUFFER_ID)");
  range.id = id;
  return range;
}

std::optional<IpcHandle> share_memory(Device& device, CUdeviceptr base) {
  DeviceGuard guard(device);
  CUipcMemHandle native{};
  const CUresult result = device.driver().ipc_get_mem_handle(&native, base);
  if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED) return std::nullopt;
  device.check(result, "cuIpcGetMemHandle");
  return bytes_of(native);
}

std::optional<PhysicalMemory> PhysicalMemory::at(Device& device, CUdeviceptr address) {
  if (!device.properties().virtual_memory) return std::nullopt;
  DeviceGuard guard(device);
  const RelaxedCapture relaxed(device.driver());
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result =
      device.driver().mem_retain_allocation_handle(&handle, reinterpret_cast<void*>(address));
  if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED) return std::nullopt;
  device.check(result, "cuMemRetainAllocationHandle");
  return PhysicalMemory(device, handle);
}

PhysicalMemory::PhysicalMemory(Device& device, CUmemGenericAllocationHandle handle)
    : device_(device.shared_from_this()), handle_(handle) {}

PhysicalMemory::~PhysicalMemory() {
  if (!device_ || device_->is_lost()) return;
  try {
    DeviceGuard guard(*device_);
    const RelaxedCapture relaxed(device_->driver());
    device_->check(device_->driver().mem_release(handle_), "cuMemRelease");
  } catch (const Error& error) {
    if (!device_->is_lost()) log::error(error.text());
  }
}

PhysicalMemory::PhysicalMemory(PhysicalMemory&& other) noexcept
    : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, 0)) {}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  return *this;
}

Descriptor PhysicalMemory::share() const {
  DeviceGuard guard(*device_);
  const RelaxedCapture relaxed(device_->driver());
  int number = -1;
  const CUresult result = device_->driver().mem_export_to_shareable_handle(
      &number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED ||
      result == CUDA_ERROR_NOT_PERMITTED) {
    return {};
  }
  device_->check(result, "cuMemExportToShareableHandle");
  return Descriptor(number);
}

OpenedMemory::OpenedMemory(Device& device, const IpcHandle& handle,
                           const std::function<void()>& close_others)
    : device_(device.shared_from_this()) {
  DeviceGuard guard(device);
  const Driver& driver = device.driver();
  RelaxedCapture relaxed(driver);
  const auto open = [&] {
    return driver.ipc_open_mem_handle(&base_, native_of<CUipcMemHandle>(handle),
                                      CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  };
  CUresult result = open();
  if (result == CUDA_ERROR_ALREADY_MAPPED && close_others) {
    close_others();
    result = open();
  }
  device.check(result, "cuIpcOpenMemHandle");
  // Measured here, because the size that a peer states is not trusted.
  const CUresult measured = driver.mem_get_address_range(nullptr, &bytes_, base_);
  if (measured == CUDA_SUCCESS) return;
  driver.ipc_close_mem_handle(base_);
  device.check(measured, "cuMemGetAddressRange of opened memory");
}

OpenedMemory::OpenedMemory(Device& device, const Descriptor& descriptor, std::size_t bytes)
    : device_(device.shared_from_this()), bytes_(bytes), is_mapped_(true) {
  if (bytes == 0) throw Error(Blame::Caller, "shared memory of 0 bytes cannot be opened");
  DeviceGuard guard(device);
  const Driver& driver = device.driver();
  const RelaxedCapture relaxed(driver);
  CUmemGenericAllocationHandle handle = 0;
  // The driver takes the descriptor's number as a pointer.
  void* const number = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.get()));
  device.check(driver.mem_import_from_shareable_handle(&handle, number,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  CUresult result = driver.mem_address_reserve(&base_, bytes, 0, 0, 0);
  const char* what = "cuMemAddressReserve for shared memory";
  if (result == CUDA_SUCCESS) {
    // The driver refuses if the memory is smaller: the size that a peer states is not trusted.
    result = driver.mem_map(base_, bytes, 0, handle, 0);
    what = "cuMemMap of shared memory";
    if (result == CUDA_SUCCESS) {
      CUmemAccessDesc access{};
      access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.index()};
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      result = driver.mem_set_access(base_, bytes, &access, 1);
      what = "cuMemSetAccess to shared memory";
      if (result != CUDA_SUCCESS) driver.mem_unmap(base_, bytes);
    }
    if (result != CUDA_SUCCESS) driver.mem_address_free(base_, bytes);
  }
  driver.mem_release(handle);  // the mapping keeps the memory
  device.check(result, what);
}

OpenedMemory::~OpenedMemory() {
  device_->retirement().retire(
      Fence(), [&device = *device_, base = base_, bytes = bytes_, is_mapped = is_mapped_] {
        if (device.is_lost()) return;
        DeviceGuard guard(device);
        RelaxedCapture relaxed(device.driver());
        if (!is_mapped)
          return device.check(device.driver().ipc_close_mem_handle(base), "cuIpcCloseMemHandle");
        device.check(device.driver().mem_unmap(base, bytes), "cuMemUnmap");
        device.check(device.driver().mem_address_free(base, bytes), "cuMemAddressFree");
      });
}

SharedEvent::SharedEvent(Device& device) : EventRef(device, nullptr) {
  DeviceGuard guard(device);
  device.check(
      device.driver().event_create(&native_, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS),
      "cuEventCreate(INTERPROCESS)");
}

SharedEvent::SharedEvent(Device& device, const IpcHandle& theirs) : EventRef(device, nullptr) {
  DeviceGuard guard(device);
  device.check(device.driver().ipc_open_event_handle(&native_, native_of<CUipcEventHandle>(theirs)),
               "cuIpcOpenEventHandle");
}

SharedEvent::~SharedEvent() {
  if (native_ == nullptr) return;
  try {
    DeviceGuard guard(*device_);
    device_->check(device_->driver().event_destroy(native_), "cuEventDestroy");
  } catch (const Error& error) {
    if (!device_->is_lost()) log::error(error.text());
  }
}

SharedEvent::SharedEvent(SharedEvent&& other) noexcept
    : EventRef(other.device(), std::exchange(other.native_, nullptr)) {}

IpcHandle SharedEvent::handle() const {
  DeviceGuard guard(*device_);
  CUipcEventHandle native{};
  device_->check(device_->driver().ipc_get_event_handle(&native, native_), "cuIpcGetEventHandle");
  return bytes_of(native);
}

}  // namespace weft::cuda
