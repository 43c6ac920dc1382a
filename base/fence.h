// "The bytes are ready." A Fence is a recorded CUDA event or a host flag. A stream waits on it, the
// host polls it or blocks on it; an empty Fence has passed. Passed once, it stays passed. Copies
// share one source. Usable from every thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/task.h>

namespace weft {

namespace cuda {
class StreamRef;
}

class Fence {
 public:
  // What a fence watches. HostFlag below; the recorded event and the flag that streams can wait on
  // are in cuda/fence.h.
  class Source {
   public:
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    virtual ~Source() = default;
    virtual bool query() const noexcept = 0;
    virtual bool synchronize(Deadline deadline) const noexcept = 0;
    // Makes the stream wait; does nothing once it has passed. Throws Unsupported where the device
    // cannot see the source.
    virtual void wait(const cuda::StreamRef& stream) const = 0;
    // Runs the task when the source passes, on the thread that passes it; at once if it has passed.
    // Returns false, with the task untouched, where nobody on the host would notice (an event):
    // such a fence is polled, see EventLoop::when.
    virtual bool on_passed(Task& task) const = 0;
  };

  Fence() = default;
  explicit Fence(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

  // Whether it has passed. Never blocks.
  bool query() const noexcept { return !source_ || source_->query(); }
  // The host blocks until it passes; false if the deadline came first.
  [[nodiscard]] bool synchronize(Deadline deadline = Deadline::never()) const noexcept {
    return !source_ || source_->synchronize(deadline);
  }
  // The stream waits, the host goes on.
  void wait(const cuda::StreamRef& stream) const {
    if (source_) source_->wait(stream);
  }

  const std::shared_ptr<const Source>& source() const { return source_; }

 private:
  std::shared_ptr<const Source> source_;
};

// A flag that the host raises. In plain memory, so no stream can wait on it; cuda::MappedFlag is
// one that streams see.
class HostFlag : public Fence::Source {
 public:
  HostFlag() : HostFlag(nullptr, 1) {}

  // Passes the fence, wakes who is blocked on it and runs the on_passed tasks on this thread.
  // Raising again does nothing.
  void raise() noexcept;

  bool query() const noexcept override { return reached(word_->load(std::memory_order_acquire)); }
  bool synchronize(Deadline deadline) const noexcept override;
  void wait(const cuda::StreamRef& stream) const override;
  bool on_passed(Task& task) const override;

 protected:
  // `word` lies in memory that a device sees as well, and only ever counts up: the flag is raised
  // when it has reached `value`, in cyclic order as cuStreamWaitValue32 compares. So the word's
  // next flag (value + 1) may be made while streams still wait for this one.
  HostFlag(std::atomic<std::uint32_t>* word, std::uint32_t value)
      : word_(word ? word : &own_word_), value_(value) {}

  // By raise(), once the flag is seen to be raised, before its tasks.
  virtual void raised() const noexcept {}

 private:
  bool reached(std::uint32_t seen) const noexcept {
    return static_cast<std::int32_t>(seen - value_) >= 0;
  }

  std::atomic<std::uint32_t> own_word_{0};
  std::atomic<std::uint32_t>* word_;
  std::uint32_t value_;
  mutable std::atomic<std::uint32_t> sleepers_{0};  // waking nobody costs a system call as well
  mutable std::mutex mutex_;                        // of tasks_
  mutable std::vector<Task> tasks_;
};

}  // namespace weft
