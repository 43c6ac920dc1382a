// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>

namespace weft {

namespace {

thread_local int endings = 0;  // the number of State::end calls that this thread is inside

struct InsideEnding {
  InsideEnding() { ++endings; }
  ~InsideEnding() { --endings; }
  InsideEnding(const InsideEnding&) = delete;
  InsideEnding& operator=(const InsideEnding&) = delete;
};

}  // namespace

bool Op::ending() { return endings > 0; }

struct Op::State {
  Fence done;
  std::shared_ptr<HostFlag> flag;  // null if `done` is an event
  std::atomic<bool> finished{false};
  std::atomic<int> source_rank{-1};
  mutable Mutex mutex;
  std::optional<Error> error WEFT_GUARDED_BY(mutex);
  Pin pin WEFT_GUARDED_BY(mutex);
  std::vector<Task> tasks WEFT_GUARDED_BY(mutex);

  bool end(std::optional<Error> why) noexcept {
    const InsideEnding inside;
    Pin released;
    std::vector<Task> due;
    {
      MutexLock lock(mutex);
      if (finished.load(std::memory_order_relaxed)) return false;
      error = std::move(why);
      released = std::move(pin);
      due.swap(tasks);
      finished.store(true, std::memory_order_release);
    }
    released.reset();
    if (flag) flag->raise();
    for (Task& task : due) task();
    return true;
  }
};

void keep_for_good(Pin memory) noexcept {
  static constinit ForkMutex mutex(ForkOrder::Counts);
  // Never destroyed, and reachable, so that leak checkers do not report it.
  static auto* const kept WEFT_POINTEE_GUARDED_BY(mutex) =
      std::make_unique<std::vector<Pin>>().release();
  MutexLock lock(mutex);
  kept->push_back(std::move(memory));
}

Op Op::failed(Error error) {
  Completion completion{Pin()};
  completion.fail(std::move(error));
  return completion.op();
}

Fence Op::done() const { return state_ ? state_->done : Fence(); }

std::optional<Error> Op::error() const {
  if (!state_) return std::nullopt;
  MutexLock lock(state_->mutex);
  return state_->error;
}

int Op::source_rank() const {
  return state_ ? state_->source_rank.load(std::memory_order_acquire) : -1;
}

bool Op::ended() const { return !state_ || state_->finished.load(std::memory_order_acquire); }

void Op::on_ended(Task task) const {
  if (state_) {
    MutexLock lock(state_->mutex);
    if (!state_->finished.load(std::memory_order_relaxed)) {
      state_->tasks.push_back(std::move(task));
      return;
    }
  }
  task();
}

Completion::Completion(Pin pin, std::shared_ptr<HostFlag> flag)
    : state_(std::make_shared<Op::State>()) {
  state_->done = Fence(flag);
  state_->flag = std::move(flag);
  state_->pin = std::move(pin);
}

Completion::Completion(Pin pin, Fence done) : state_(std::make_shared<Op::State>()) {
  state_->done = std::move(done);
  state_->pin = std::move(pin);
}

Op Completion::op() const { return Op(state_); }

void Completion::set_source_rank(int rank) noexcept {
  state_->source_rank.store(rank, std::memory_order_release);
}

bool Completion::finish() noexcept { return state_->end(std::nullopt); }

bool Completion::fail(Error error) noexcept { return state_->end(std::move(error)); }

void Completion::keep_pin() noexcept {
  MutexLock lock(state_->mutex);
  keep_for_good(state_->pin);
}

bool Completion::finished() const noexcept {
  return state_->finished.load(std::memory_order_acquire);
}

}  // namespace weft
