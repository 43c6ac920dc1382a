// SPDX-License-Identifier: Apache-2.0
// The CUDA half of Fence: a recorded event. (Flags that streams wait for or raise are in
// flag_pool.h.)
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include <weft/base/fence.h>
#include <weft/cuda/event.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// Returns a fence that passes when everything enqueued on the stream so far has run. Enqueues one
// event; the host does not wait. Throws Device if the context has ended.
//
// On a stream that is being captured into a graph, the enqueued work does not run now but at each
// launch of the graph. Streams wait for the fence as a part of the capture; for the host it passes
// when the capture ends.
Fence record(const StreamRef& stream);
// True if the fence was recorded on a stream that was being captured.
bool is_captured(const Fence& fence) noexcept;

// The source of such a fence: an event from the device's pool. It returns to the pool when the last
// copy of the fence is destroyed; streams that wait for it no longer need it, because
// cuStreamWaitEvent captured the record. The fence also passes when the context ends, see
// Device::lost(). Any thread may use it.
class EventFence final : public Fence::Source {
 public:
  // Takes an event from the pool and records it.
  explicit EventFence(const StreamRef& stream);
  ~EventFence() override;
  bool is_captured() const noexcept { return captured_.has_value(); }

  bool query() const noexcept override;
  // Polls, because the driver does not signal the host when an event passes.
  bool synchronize(Deadline deadline) const noexcept override;
  // Calls cuStreamWaitEvent; the stream may be of another device. It does not first query whether
  // the event has passed, because the query takes longer than the wait. The exception is a capture,
  // which may not wait for work that was enqueued outside it.
  void wait(const StreamRef& stream) const override;
  // Always returns false: such a fence is polled, see EventLoop::when.
  bool on_passed(Task& task) const override;

 private:
  std::shared_ptr<Device> device_;
  // The stream, if it was being captured. Fences query the stream and not the event, because
  // querying the event would end the capture. The stream must live until the fence has passed.
  std::optional<StreamRef> captured_;
  Event event_;
  mutable std::atomic<bool> passed_{false};  // once true, saves the call of the driver
};

}  // namespace weft::cuda
