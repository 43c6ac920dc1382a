// SPDX-License-Identifier: Apache-2.0
// The fake driver's devices and contexts, and the checks that every call passes.
#include <algorithm>
#include <cstring>

#include <unistd.h>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

// The context that is current on this thread. It names the fake driver that set it, so the next
// fake driver starts with no current context.
struct Current {
  const FakeState* driver = nullptr;
  FakeContext* context = nullptr;
};
thread_local Current current_of_thread;

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult code) {
  const auto* const found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                         [&](const auto& e) { return e.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

}  // namespace

thread_local bool inside_host_function = false;

FakeState::FakeState(const FakeDriver::Options& chosen)
    : options(chosen), primary(static_cast<std::size_t>(chosen.devices)) {}

FakeState::~FakeState() {
  {
    std::lock_guard lock(mutex);
    stopping = true;
  }
  changed.notify_all();
  for (const auto& stream : streams) {
    if (stream->worker.joinable()) stream->worker.join();
  }
  for (auto& [base, allocation] : allocations) unmap(allocation);
  for (const FakeHandle& handle : handles) {
    if (handle.memory != nullptr) ::close(handle.file);
  }
}

CUresult FakeState::enter(Function function) {
  ++calls[static_cast<std::size_t>(function)];
  if (inside_host_function) {
    return refuse(CUDA_ERROR_NOT_PERMITTED,
                  std::string(name(function)) + " was called inside a host function or a kernel");
  }
  for (auto failure = failures.begin(); failure != failures.end(); ++failure) {
    if (failure->function != function || --failure->after > 0) continue;
    const CUresult result = failure->result;
    failures.erase(failure);
    return result;
  }
  return check_captures(function);
}

CUresult FakeState::refuse(CUresult result, const std::string& why) {
  complain(why);
  return result;
}

FakeContext* FakeState::current(CUresult& error) {
  FakeContext* const context =
      current_of_thread.driver == this ? current_of_thread.context : nullptr;
  if (context == nullptr) {
    error = refuse(CUDA_ERROR_INVALID_CONTEXT,
                   "a call that needs a current context was made without one");
    return nullptr;
  }
  error = context->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context->lost;
  return error == CUDA_SUCCESS ? context : nullptr;
}

CUresult FakeState::init(unsigned) { return CUDA_SUCCESS; }

CUresult FakeState::driver_get_version(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult FakeState::get_error_name(CUresult error, const char** text) {
  const ErrorText* const found = find_error(error);
  *text = found ? found->name : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult FakeState::get_error_string(CUresult error, const char** text) {
  const ErrorText* const found = find_error(error);
  *text = found ? found->text : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult FakeState::device_get_count(int* count) {
  *count = options.devices;
  return CUDA_SUCCESS;
}

CUresult FakeState::device_get(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= options.devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult FakeState::device_get_name(char* text, int length, CUdevice) {
  std::strncpy(text, "fake GPU", static_cast<std::size_t>(length));
  return CUDA_SUCCESS;
}

CUresult FakeState::device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *value = options.stream_mem_ops; break;
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES: *value = options.flush_remote_writes; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = options.memory_pools; break;
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: *value = options.dma_buf; break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
      *value = options.remote_writes_order;
      break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
      *value = options.host_flushes ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST : 0;
      break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    default:
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    "the fake driver has no device attribute " + std::to_string(attribute));
  }
  return CUDA_SUCCESS;
}

CUresult FakeState::device_primary_ctx_retain(CUcontext* context, CUdevice device) {
  FakeContext*& here = primary.at(static_cast<std::size_t>(device));
  if (here == nullptr) {
    here = contexts.emplace_back(std::make_unique<FakeContext>()).get();
    here->device = device;
    auto& legacy = streams.emplace_back(std::make_unique<FakeStream>());
    legacy->context = here;
    legacy->number = static_cast<int>(streams.size());
    legacy_streams[here] = legacy.get();
  }
  ++here->retained;
  *context = handle_of<CUcontext>(here);
  return CUDA_SUCCESS;
}

CUresult FakeState::device_primary_ctx_release(CUdevice device) {
  FakeContext*& here = primary.at(static_cast<std::size_t>(device));
  if (here == nullptr)
    return refuse(CUDA_ERROR_INVALID_CONTEXT,
                  "a primary context was released that nobody retained");
  if (--here->retained > 0) return CUDA_SUCCESS;
  complain_of_hung(here);
  lose(*here, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  // An operation that another thread is running still uses the context's memory.
  std::unique_lock lock(mutex, std::adopt_lock);
  changed.wait(lock, [this, here] {
    return std::none_of(streams.begin(), streams.end(),
                        [here](const auto& s) { return s->context == here && s->running; });
  });
  lock.release();
  here->destroyed = true;
  legacy_streams.erase(here);
  for (auto& [base, allocation] : allocations) {
    if (allocation.context == here && allocation.state != Allocation::State::Freed)
      unmap(allocation);
  }
  here = nullptr;
  return CUDA_SUCCESS;
}

CUresult FakeState::ctx_get_current(CUcontext* context) {
  *context =
      handle_of<CUcontext>(current_of_thread.driver == this ? current_of_thread.context : nullptr);
  return CUDA_SUCCESS;
}

CUresult FakeState::ctx_set_current(CUcontext context) {
  FakeContext* const found = object_of(contexts, context);
  if (context != nullptr && found == nullptr)
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "an unknown context was made current");
  current_of_thread = {this, found};
  return CUDA_SUCCESS;
}

CUresult FakeState::ctx_get_stream_priority_range(int* least, int* greatest) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult FakeState::ctx_synchronize() {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  return block_until([this, context] { return idle(*context); }, *context,
                     Function::ctx_synchronize);
}

}  // namespace weft::harness
