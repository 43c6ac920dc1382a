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

// A fence that passes when everything enqueued on the stream so far has run. Enqueues one event;
// the host does not wait. Throws Device if the context has ended.
//
// On a stream that is being captured into a graph nothing runs, now or later: what was enqueued
// runs whenever the graph is launched. Streams wait for the fence as a part of the capture; for the
// host it passes when the capture ends.
Fence record(const StreamRef& stream);
// Whether the fence was recorded on a stream that was being captured.
bool is_captured(const Fence& fence) noexcept;

// What such a fence watches: an event of the device's pool, which goes back when the last copy of
// the fence is gone. (Streams that wait for it do not need it any longer: cuStreamWaitEvent
// captured the record when it was called.) Passes also when the context ends, see Device::lost().
// Usable from every thread.
class EventFence final : public Fence::Source {
 public:
  // Takes an event and records it.
  explicit EventFence(const StreamRef& stream);
  ~EventFence() override;
  bool is_captured() const noexcept { return captured_.has_value(); }

  bool query() const noexcept override;
  // Polls; nobody on the host is told when an event passes.
  bool synchronize(Deadline deadline) const noexcept override;
  // cuStreamWaitEvent; the stream may be of another device. The driver is not asked first whether
  // the event has passed, which takes it longer than the wait, but where a capture is involved: one
  // may not wait for what was enqueued outside.
  void wait(const StreamRef& stream) const override;
  // Always false: whoever wants to be told polls, see EventLoop::when.
  bool on_passed(Task& task) const override;

 private:
  std::shared_ptr<Device> device_;
  // The stream, if it was being captured. It is asked in the event's place, which would end the
  // capture, and lives until the fence has passed.
  std::optional<StreamRef> captured_;
  Event event_;
  mutable std::atomic<bool> passed_{false};  // saves the driver's call once known
};

}  // namespace weft::cuda
