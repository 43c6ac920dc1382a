// SPDX-License-Identifier: Apache-2.0
// Says "these bytes are ready". A Fence is a recorded CUDA event or a host flag: a stream waits for
// it, a host thread polls it or blocks on it. An empty Fence has passed. Once passed, it stays
// passed. Copies share one source. Any thread may use it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>

namespace weft {

namespace cuda {
class StreamRef;
}

class Fence {
 public:
  // The state that a fence watches: HostFlag below, or the recorded event and the flag for streams
  // in cuda/fence.h.
  class Source {
   public:
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    virtual ~Source() = default;
    virtual bool query() const noexcept = 0;
    virtual bool synchronize(Deadline deadline) const noexcept = 0;
    // Makes the stream wait; does nothing if the source has passed. Throws Unsupported if the
    // device cannot see the source.
    virtual void wait(const cuda::StreamRef& stream) const = 0;
    // Runs the task when the source passes, on the thread that passes it; at once if it has passed.
    // Returns false and leaves the task untouched if no host thread would notice (an event); such a
    // fence is polled, see EventLoop::when.
    virtual bool on_passed(Task& task) const = 0;
  };

  Fence() = default;
  explicit Fence(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

  // True if the fence has passed. Never blocks.
  bool query() const noexcept { return !source_ || source_->query(); }
  // Blocks the host thread until the fence has passed; returns false if the deadline passed first.
  [[nodiscard]] bool synchronize(Deadline deadline = Deadline::never()) const noexcept {
    return !source_ || source_->synchronize(deadline);
  }
  // Makes the stream wait; the host thread continues.
  void wait(const cuda::StreamRef& stream) const {
    if (source_) source_->wait(stream);
  }

  const std::shared_ptr<const Source>& source() const { return source_; }

 private:
  std::shared_ptr<const Source> source_;
};

// A flag that a host thread raises. It is in plain memory, so no stream can wait for it; for
// streams there is cuda::MappedFlag.
class HostFlag : public Fence::Source {
 public:
  HostFlag() : HostFlag(nullptr, 1) {}

  // Passes the fence, wakes the threads blocked on it, and runs the on_passed tasks on this thread.
  // A second call does nothing.
  void raise() noexcept;

  bool query() const noexcept override { return reached(word_->load(std::memory_order_acquire)); }
  bool synchronize(Deadline deadline) const noexcept override;
  void wait(const cuda::StreamRef& stream) const override;
  bool on_passed(Task& task) const override;

 protected:
  // `word` is in memory that a device also sees, and only counts up. The flag is raised once the
  // word has reached `value`, in cyclic order, as cuStreamWaitValue32 compares. So the word's next
  // flag (value + 1) may be made while streams still wait for this one.
  HostFlag(std::atomic<std::uint32_t>* word, std::uint32_t value)
      : word_(word ? word : &own_word_), value_(value) {}

  // Called by raise(), after the flag is visible as raised and before its tasks run.
  virtual void raised() const noexcept {}

 private:
  bool reached(std::uint32_t seen) const noexcept {
    return static_cast<std::int32_t>(seen - value_) >= 0;
  }

  std::atomic<std::uint32_t> own_word_{0};
  std::atomic<std::uint32_t>* word_;
  std::uint32_t value_;
  // The number of blocked threads. At zero, raise() saves the system call that wakes them.
  mutable std::atomic<std::uint32_t> sleepers_{0};
  mutable Mutex mutex_;
  mutable std::vector<Task> tasks_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft
