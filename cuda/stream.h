// A stream, as view and as owner. What is enqueued on a stream runs in the order of the calls;
// nothing here makes the host wait for it (record(stream).synchronize(deadline) in fence.h does).
//
// Enqueuing is safe from every thread, but two threads that enqueue on one stream get an order
// nobody chose.
#pragma once

#include <memory>

#include <weft/cuda/device.h>

namespace weft::cuda {

// Somebody's stream: Weft's own or the native handle of a libtorch stream. Null is the device's
// legacy default stream (which libtorch uses unless told otherwise). Copies freely; the stream and
// the device must outlive it.
class StreamRef {
 public:
  StreamRef(Device& device, CUstream native) noexcept : device_(&device), native_(native) {}

  Device& device() const noexcept { return *device_; }
  const Driver& driver() const noexcept { return device_->driver(); }
  CUstream native() const noexcept { return native_; }

  // Whether everything that was enqueued has run. Throws Device if the context has ended.
  bool query() const;
  // Whether what is enqueued goes into a graph at present (cuStreamBeginCapture) and nothing runs.
  bool is_capturing() const noexcept;

  friend bool operator==(const StreamRef&, const StreamRef&) = default;

 protected:
  Device* device_;
  CUstream native_;
};

enum class Priority { Normal, High };

// A stream of our own. Never synchronises with the legacy default stream.
class Stream : public StreamRef {
 public:
  // High: its kernels are scheduled before those of other streams; what is running is not
  // interrupted.
  explicit Stream(Device& device, Priority priority = Priority::Normal);
  // What is enqueued still runs; does not wait for it. Views of the stream end here.
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;

 private:
  void destroy() noexcept;
  std::shared_ptr<Device> owner_;  // keeps the context; null when moved from
};

}  // namespace weft::cuda
