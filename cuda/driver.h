// SPDX-License-Identifier: Apache-2.0
// Every function of the CUDA driver that Weft uses, in one table filled by dlopen. So a program
// built with CUDA starts on a machine without it, and the tests fill the same table with a fake. No
// other part of Weft calls CUDA.
//
// A Driver is immutable, and any thread may use it. There is no global one: it is passed to the
// code that needs it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <cuda.h>

#include <weft/base/error.h>
#include <weft/base/result.h>

namespace weft::cuda {

// Sharing memory between processes (ipc.h). mem_free and ipc_close_mem_handle block the host until
// the device is idle.
// clang-format off
#define WEFT_CUDA_IPC_FUNCTIONS(function)                      \
  function(device_get_uuid, cuDeviceGetUuid)                   \
  function(device_can_access_peer, cuDeviceCanAccessPeer)      \
  function(mem_alloc, cuMemAlloc)                              \
  function(mem_free, cuMemFree)                                \
  function(mem_get_address_range, cuMemGetAddressRange)        \
  function(ipc_get_mem_handle, cuIpcGetMemHandle)              \
  function(ipc_open_mem_handle, cuIpcOpenMemHandle)            \
  function(ipc_close_mem_handle, cuIpcCloseMemHandle)          \
  function(ipc_get_event_handle, cuIpcGetEventHandle)          \
  function(ipc_open_event_handle, cuIpcOpenEventHandle)

// Memory behind virtual addresses, and sharing of such memory. Weft itself allocates none.
// mem_unmap blocks the host as mem_free does.
#define WEFT_CUDA_VIRTUAL_MEMORY_FUNCTIONS(function)                          \
  function(mem_create, cuMemCreate)                                           \
  function(mem_release, cuMemRelease)                                         \
  function(mem_address_reserve, cuMemAddressReserve)                          \
  function(mem_address_free, cuMemAddressFree)                                \
  function(mem_map, cuMemMap)                                                 \
  function(mem_unmap, cuMemUnmap)                                             \
  function(mem_set_access, cuMemSetAccess)                                    \
  function(mem_retain_allocation_handle, cuMemRetainAllocationHandle)         \
  function(mem_export_to_shareable_handle, cuMemExportToShareableHandle)      \
  function(mem_import_from_shareable_handle, cuMemImportFromShareableHandle)

// Memory that a NIC reads and writes (rdma.h).
#define WEFT_CUDA_RDMA_FUNCTIONS(function)                                   \
  function(mem_get_handle_for_address_range, cuMemGetHandleForAddressRange) \
  function(flush_gpu_direct_rdma_writes, cuFlushGPUDirectRDMAWrites)

// function(member, symbol): cuda.h's macros turn each symbol into its versioned name
// (cuStreamDestroy into cuStreamDestroy_v2), both for the pointer's type and for the name that is
// looked up. The last three block the host without a limit: they are for benches and for places
// that may block, never for a data path.
#define WEFT_CUDA_DRIVER_FUNCTIONS(function)                                       \
  WEFT_CUDA_IPC_FUNCTIONS(function)                                                \
  WEFT_CUDA_VIRTUAL_MEMORY_FUNCTIONS(function)                                     \
  WEFT_CUDA_RDMA_FUNCTIONS(function)                                               \
  function(init, cuInit)                                                           \
  function(driver_get_version, cuDriverGetVersion)                                 \
  function(get_error_name, cuGetErrorName)                                         \
  function(get_error_string, cuGetErrorString)                                     \
  function(device_get_count, cuDeviceGetCount)                                     \
  function(device_get, cuDeviceGet)                                                \
  function(device_get_name, cuDeviceGetName)                                       \
  function(device_get_attribute, cuDeviceGetAttribute)                             \
  function(device_primary_ctx_retain, cuDevicePrimaryCtxRetain)                    \
  function(device_primary_ctx_release, cuDevicePrimaryCtxRelease)                  \
  function(ctx_get_current, cuCtxGetCurrent)                                       \
  function(ctx_set_current, cuCtxSetCurrent)                                       \
  function(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange)             \
  function(stream_create_with_priority, cuStreamCreateWithPriority)                \
  function(stream_destroy, cuStreamDestroy)                                        \
  function(stream_query, cuStreamQuery)                                            \
  function(stream_wait_event, cuStreamWaitEvent)                                   \
  function(stream_wait_value32, cuStreamWaitValue32)                               \
  function(stream_write_value32, cuStreamWriteValue32)                             \
  function(stream_batch_mem_op, cuStreamBatchMemOp)                                \
  function(event_create, cuEventCreate)                                            \
  function(event_destroy, cuEventDestroy)                                          \
  function(event_record, cuEventRecord)                                            \
  function(event_query, cuEventQuery)                                              \
  function(event_elapsed_time, cuEventElapsedTime)                                 \
  function(stream_is_capturing, cuStreamIsCapturing)                               \
  function(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode) \
  function(launch_kernel, cuLaunchKernel)                                          \
  function(launch_host_func, cuLaunchHostFunc)                                     \
  function(mem_host_alloc, cuMemHostAlloc)                                         \
  function(mem_free_host, cuMemFreeHost)                                           \
  function(mem_host_get_device_pointer, cuMemHostGetDevicePointer)                 \
  function(mem_alloc_async, cuMemAllocAsync)                                       \
  function(mem_alloc_from_pool_async, cuMemAllocFromPoolAsync)                     \
  function(mem_free_async, cuMemFreeAsync)                                         \
  function(mem_pool_create, cuMemPoolCreate)                                       \
  function(mem_pool_destroy, cuMemPoolDestroy)                                     \
  function(mem_pool_set_attribute, cuMemPoolSetAttribute)                          \
  function(pointer_get_attribute, cuPointerGetAttribute)                           \
  function(memcpy_async, cuMemcpyAsync)                                            \
  function(memset_d8_async, cuMemsetD8Async)                                       \
  function(library_load_data, cuLibraryLoadData)                                   \
  function(library_unload, cuLibraryUnload)                                        \
  function(library_get_kernel, cuLibraryGetKernel)                                 \
  function(library_get_kernel_count, cuLibraryGetKernelCount)                      \
  function(library_enumerate_kernels, cuLibraryEnumerateKernels)                   \
  function(kernel_get_function, cuKernelGetFunction)                               \
  function(kernel_get_param_info, cuKernelGetParamInfo)                            \
  function(func_load, cuFuncLoad)                                                  \
  function(stream_synchronize, cuStreamSynchronize)                                \
  function(event_synchronize, cuEventSynchronize)                                  \
  function(ctx_synchronize, cuCtxSynchronize)
// clang-format on

struct Driver {
#define WEFT_CUDA_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_CUDA_MEMBER)
#undef WEFT_CUDA_MEMBER

  // Opens the library, looks up every function and calls cuInit. Returns Unsupported with the
  // reason if any of that fails. Starts the driver's threads, so do not call it before a fork.
  static Result<std::shared_ptr<const Driver>> open(const char* library = "libcuda.so.1");
};

// Makes an error such as "what: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", with the code as
// native_code(). Out of memory is Busy; an argument that the driver refuses is Caller; a missing
// ability is Unsupported; everything else is Device.
Error error_of(const Driver& driver, CUresult result, std::string_view what,
               Place place = Place::current());

// Throws error_of() unless the call succeeded. Prefer Device::check, which also names the device.
inline void check(const Driver& driver, CUresult result, std::string_view what,
                  Place place = Place::current()) {
  if (result != CUDA_SUCCESS) throw error_of(driver, result, what, place);
}

// True if this error ends the context, so that every later call on the device returns it again.
// (CUDA_ERROR_UNKNOWN may end the context, but the driver also returns it for a single descriptor
// that it cannot import; so Device::check probes the context then.)
bool is_sticky(CUresult result);
// True if the call is not allowed because a stream is being captured into a graph: a mistake of the
// program, not a failure of the device.
bool is_of_capture(CUresult result);

// While it lives, calls on this thread do not break a capture into a graph
// (cuThreadExchangeStreamCaptureMode). Without it, an allocation, or a query of an event outside
// the capture, ends the capture of any thread.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) noexcept : driver_(driver) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept { driver_.thread_exchange_stream_capture_mode(&mode_); }

  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // after exchange(): the former mode
};

}  // namespace weft::cuda
