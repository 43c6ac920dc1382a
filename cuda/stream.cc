// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/base/log.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

bool StreamRef::query() const {
  DeviceGuard guard(*device_);
  RelaxedCapture relaxed(driver());
  const CUresult result = driver().stream_query(native_);
  if (result == CUDA_ERROR_NOT_READY) return false;
  device_->check(result, "cuStreamQuery");
  return true;
}

bool StreamRef::is_capturing() const noexcept {
  try {
    DeviceGuard guard(*device_);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return driver().stream_is_capturing(native_, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
  } catch (const Error&) {
    return false;  // the context has ended
  }
}

Stream::Stream(Device& device, Priority priority)
    : StreamRef(device, nullptr), owner_(device.shared_from_this()) {
  const auto& properties = device.properties();
  const int level =
      priority == Priority::High ? properties.greatest_priority : properties.least_priority;
  DeviceGuard guard(device);
  device.check(driver().stream_create_with_priority(&native_, CU_STREAM_NON_BLOCKING, level),
               "cuStreamCreateWithPriority");
}

Stream::~Stream() { destroy(); }

Stream::Stream(Stream&& other) noexcept : StreamRef(other), owner_(std::move(other.owner_)) {
  other.native_ = nullptr;
}

Stream& Stream::operator=(Stream&& other) noexcept {
  if (this != &other) {
    destroy();
    StreamRef::operator=(other);
    owner_ = std::move(other.owner_);
    other.native_ = nullptr;
  }
  return *this;
}

void Stream::destroy() noexcept {
  if (!owner_) return;
  try {
    DeviceGuard guard(*device_);
    device_->check(driver().stream_destroy(native_), "cuStreamDestroy");
  } catch (const Error& error) {
    if (!device_->is_lost()) log::error(error.text());
  }
  owner_.reset();
}

}  // namespace weft::cuda
