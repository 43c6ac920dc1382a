// SPDX-License-Identifier: Apache-2.0
#include <weft/base/log.h>
#include <weft/cuda/device.h>
#include <weft/cuda/event.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/span.h>

namespace weft::cuda {

int Device::count(const Driver& driver) {
  int count = 0;
  cuda::check(driver, driver.device_get_count(&count), "cuDeviceGetCount");
  return count;
}

std::shared_ptr<Device> Device::open(std::shared_ptr<const Driver> driver, int index) {
  const int present = count(*driver);
  if (index < 0 || index >= present) {
    throw Error(Blame::Caller, "there is no cuda:" + std::to_string(index) +
                                   ": this process sees " + std::to_string(present) +
                                   " GPU(s); see CUDA_VISIBLE_DEVICES");
  }
  return std::make_shared<Device>(Key{}, std::move(driver), index);
}

Device::Device(Key, std::shared_ptr<const Driver> driver, int index)
    : driver_(std::move(driver)),
      index_(index),
      events_(std::make_unique<EventPool>(*this)),
      retirement_(std::make_unique<Retirement>()),
      spans_(std::make_unique<Spans>(*this)) {
  check(driver_->device_get(&native_, index_), "cuDeviceGet");
  check(driver_->device_primary_ctx_retain(&context_, native_), "cuDevicePrimaryCtxRetain");
  try {
    read_properties();
    DeviceGuard guard(*this);
    check(driver_->event_create(&never_recorded_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  } catch (...) {
    driver_->device_primary_ctx_release(native_);
    throw;
  }
}

Device::~Device() {
  const std::size_t pending = retirement_->pending();
  if (pending != 0) {
    log::warn(describe(id()) + " closes with " + std::to_string(pending) +
              " retired allocation(s) never reclaimed; call Device::retirement().reclaim_all() at "
              "shutdown");
  }
  try {
    DeviceGuard guard(*this);
    spans_.reset();
    events_.reset();
    driver_->event_destroy(never_recorded_);
  } catch (const Error&) {
    // The context has ended, and its events with it.
  }
  driver_->device_primary_ctx_release(native_);
}

int Device::attribute(CUdevice_attribute which, const char* what) const {
  int value = 0;
  cuda::check(*driver_, driver_->device_get_attribute(&value, which, native_), what);
  return value;
}

void Device::read_properties() {
  char name[256] = {};
  check(driver_->device_get_name(name, sizeof name - 1, native_), "cuDeviceGetName");
  properties_.name = name;
  properties_.compute_capability =
      10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability") +
      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability");
  properties_.multiprocessors =
      attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "multiprocessors");
  properties_.mem_ops_64_bit =
      attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit memory operations");
  properties_.flush_remote_writes =
      attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, "flushing remote writes");
  properties_.rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, "GPUDirect RDMA");
  properties_.dma_buf = attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, "dma-buf");
  const int order =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "order of remote writes");
  const int flushes = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
                                "flushing of remote writes");
  if (order >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) {
    properties_.remote_writes = RemoteWrites::Ordered;
  } else if ((flushes & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) != 0) {
    properties_.remote_writes = RemoteWrites::Flushed;
  }
  properties_.virtual_memory =
      attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory");
  properties_.memory_pools = attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "memory pools");
  DeviceGuard guard(*this);
  check(driver_->ctx_get_stream_priority_range(&properties_.least_priority,
                                               &properties_.greatest_priority),
        "cuCtxGetStreamPriorityRange");
}

void Device::fail(CUresult result, std::string_view what, Place place) {
  if (is_sticky(result)) lose(result);
  if (result == CUDA_ERROR_UNKNOWN && never_recorded_ != nullptr) probe();
  throw error_of(*driver_, result, std::string(what) + " on " + describe(id()), place);
}

void Device::lose(CUresult cause) noexcept {
  int expected = CUDA_SUCCESS;
  if (!lost_.compare_exchange_strong(expected, cause, std::memory_order_acq_rel)) return;
  // The driver shuts down with the process, so no caller is left to tell.
  if (cause != CUDA_ERROR_DEINITIALIZED) log::error(lost()->text());
}

std::optional<Error> Device::lost() const {
  const auto result = static_cast<CUresult>(lost_.load(std::memory_order_acquire));
  if (result == CUDA_SUCCESS) return std::nullopt;
  const Error cause = error_of(*driver_, result, describe(id()) + " is lost");
  return Error(Blame::Device,
               cause.text() + "; its context cannot be repaired; restart the process", result);
}

// Does not use check(), which may itself have called probe().
bool Device::probe() noexcept {
  if (is_lost()) return false;
  CUcontext former = nullptr;
  CUresult result = driver_->ctx_get_current(&former);
  const bool is_current = result == CUDA_SUCCESS && former == context_;
  if (result == CUDA_SUCCESS && !is_current) result = driver_->ctx_set_current(context_);
  if (result == CUDA_SUCCESS) {
    const RelaxedCapture relaxed(*driver_);
    result = driver_->event_query(never_recorded_);
    if (!is_current) driver_->ctx_set_current(former);
  }
  if (result != CUDA_SUCCESS) lose(result);
  return result == CUDA_SUCCESS;
}

DeviceGuard::DeviceGuard(Device& device) : device_(device), former_(device.context()) {
  const Driver& driver = device_.driver();
  CUcontext current = nullptr;
  device_.check(driver.ctx_get_current(&current), "cuCtxGetCurrent");
  if (current == device_.context()) return;
  device_.check(driver.ctx_set_current(device_.context()), "cuCtxSetCurrent");
  former_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (former_ == device_.context()) return;
  const CUresult result = device_.driver().ctx_set_current(former_);
  if (result != CUDA_SUCCESS) {
    log::error(
        error_of(device_.driver(), result, "cuCtxSetCurrent back from " + describe(device_.id()))
            .text());
  }
}

}  // namespace weft::cuda
