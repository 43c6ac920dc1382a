// SPDX-License-Identifier: Apache-2.0
// Streams, as a view and as an owner. Work enqueued on a stream runs in the order of the calls.
// Nothing here makes the host wait for it; record(stream).synchronize(deadline) in fence.h does.
//
// Any thread may enqueue work, but two threads that enqueue on one stream get an arbitrary order.
#pragma once

#include <memory>

#include <weft/cuda/device.h>

namespace weft::cuda {

// A view of a stream: Weft's own, or the native handle of a libtorch stream. Null is the device's
// legacy default stream, which libtorch uses by default. It can be copied freely; the stream and
// the device must outlive it.
class StreamRef {
 public:
  StreamRef(Device& device, CUstream native) noexcept : device_(&device), native_(native) {}

  Device& device() const noexcept { return *device_; }
  const Driver& driver() const noexcept { return device_->driver(); }
  CUstream native() const noexcept { return native_; }

  // True if everything that was enqueued has run. Throws Device if the context has ended.
  bool query() const;
  // True if the stream is being captured into a graph (cuStreamBeginCapture), so that enqueued work
  // does not run.
  bool is_capturing() const noexcept;

  friend bool operator==(const StreamRef&, const StreamRef&) = default;

 protected:
  Device* device_;
  CUstream native_;
};

enum class Priority { Normal, High };

// A stream that this object owns. It never synchronises with the legacy default stream.
class Stream : public StreamRef {
 public:
  // High: its kernels are scheduled before those of other streams; running kernels are not
  // interrupted.
  explicit Stream(Device& device, Priority priority = Priority::Normal);
  // Enqueued work still runs, and the destructor does not wait for it. Views of the stream become
  // invalid.
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;

 private:
  void destroy() noexcept;
  std::shared_ptr<Device> owner_;  // keeps the context; null once moved from
};

}  // namespace weft::cuda
