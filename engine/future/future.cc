// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/type_name.h>
#include <weft/engine/future/future.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/future/when_all.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft::detail {

namespace traced {
namespace {
constinit trace::Name wait{trace::Layer::Engine, "wait"};  // Work's waits have the same name
constinit trace::Name continuations{trace::Layer::Engine, "continuations"};
}  // namespace
}  // namespace traced

namespace {

// Completions that run on this thread inside one another. A few levels run at once; deeper ones are
// queued until the outermost returns to them or this thread blocks. So a chain of any length needs
// no more stack than a short one.
class Nesting {
 public:
  // `executor` runs `what` if it is queued and this thread blocks first; null: this thread does.
  template <class F>
  static void run(F what, const std::shared_ptr<Executor>& executor) {
    if (outermost == nullptr) {
      Nesting here;
      here.run_now(std::move(what));
      while (here.any_later()) here.run_now(here.take_first().task);
    } else if (outermost->depth_ < kMost) {
      outermost->run_now(std::move(what));
    } else {
      outermost->later_.push_back({Task(std::move(what)), executor});
    }
  }

  // Held while this thread blocks. Hands the queued completions to their executors first.
  // Completions in the turns of a loop that this thread drives meanwhile start a nesting of their
  // own.
  class Blocking {
   public:
    Blocking() {
      if (outermost != nullptr) outermost->run_elsewhere();
      left_ = std::exchange(outermost, nullptr);
    }
    ~Blocking() { outermost = left_; }
    Blocking(const Blocking&) = delete;
    Blocking& operator=(const Blocking&) = delete;

   private:
    Nesting* left_ = nullptr;
  };

 private:
  static constexpr int kMost = 32;
  static thread_local Nesting* outermost;
  struct Later {
    Task task;
    std::shared_ptr<Executor> executor;
  };

  Nesting() { outermost = this; }
  // Drops the queued completions that an exception has left.
  ~Nesting() { outermost = nullptr; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

  struct Level {
    explicit Level(int& its_depth) : depth(its_depth) { ++depth; }
    ~Level() { --depth; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    int& depth;
  };
  template <class F>
  void run_now(F what) {
    const Level level(depth_);
    // Destroyed within this level: its destructor may complete other futures.
    F own = std::move(what);
    own();
  }
  bool any_later() const { return next_ < later_.size(); }
  Later take_first() {
    Later first = std::move(later_[next_++]);
    if (!any_later()) {
      later_.clear();
      next_ = 0;
    }
    return first;
  }
  void run_elsewhere() {
    while (any_later()) {
      Later next = take_first();
      next.executor ? next.executor->run(std::move(next.task)) : next.task();
    }
  }

  int depth_ = 0;
  std::vector<Later> later_;
  std::size_t next_ = 0;  // index in later_ of the first that has not run
};

thread_local Nesting* Nesting::outermost = nullptr;

// Runs a continuation and logs its exception. The thread that completes the future, perhaps in a
// turn of a loop, must not see one: forward_to() throws if its promise has been set meanwhile.
void run_continuation(Task& task) noexcept {
  try {
    task();
  } catch (...) {
    log_lost_exception();
  }
}

}  // namespace

// A task that runs a future's waiting continuations on a thread that may block. If it is destroyed
// without having run, because the executor has ended, it drops them.
class FutureCore::InOrder {
 public:
  explicit InOrder(std::shared_ptr<FutureCore> core) : core_(std::move(core)) {}
  ~InOrder() {
    if (core_) core_->drop_continuations();
  }
  InOrder(InOrder&&) noexcept = default;
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
  InOrder& operator=(InOrder&&) = delete;
  void operator()() {
    const auto core = std::exchange(core_, nullptr);
    core->run_in_order();
  }

 private:
  std::shared_ptr<FutureCore> core_;
};

// One run of continuations on this thread. It ends early when one of them blocks, since that one
// may be waiting for a later one.
class FutureCore::Turn {
 public:
  explicit Turn(FutureCore& core) : core_(core), outer_(std::exchange(innermost, this)) {}
  ~Turn() { innermost = outer_; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool left() const { return left_; }

  // Called before this thread blocks: other threads run the rest.
  static void leave_all() {
    for (Turn* turn = innermost; turn; turn = turn->outer_) turn->leave();
  }

 private:
  static thread_local Turn* innermost;

  void leave() {
    if (std::exchange(left_, true)) return;
    {
      MutexLock lock(core_.mutex_);
      core_.runner_ = {};
      core_.in_turn_ = core_.any_left();
      if (!core_.in_turn_) return;
    }
    InOrder rest(core_.shared_from_this());
    core_.executor_ ? core_.executor_->run(std::move(rest)) : rest();
  }

  FutureCore& core_;
  Turn* const outer_;
  bool left_ = false;
};

thread_local FutureCore::Turn* FutureCore::Turn::innermost = nullptr;

bool FutureCore::failed() const {
  MutexLock lock(mutex_);
  return error_ != nullptr;
}

bool FutureCore::wait_until(Deadline deadline) const {
  if (done()) return true;
  Turn::leave_all();
  const Nesting::Blocking blocking;
  if (done()) return true;
  const trace::Range waiting(traced::wait);
  const trace::WaitScope counted(executor_ ? executor_->name() : "futures");
  if (executor_) {
    {
      MutexLock lock(mutex_);
      ++drivers_;
    }
    const auto leave = [this] {
      MutexLock lock(mutex_);
      --drivers_;
    };
    bool is_over = false;
    const auto drive = [&] {
      is_over = executor_->drive([this] { return done(); }, deadline, this) || deadline.passed();
    };
    try {
      // A thread of another executor tells that executor that it blocks.
      Executor* const own = thread_executor();
      own != nullptr&& own != executor_.get() ? own->block(drive) : drive();
    } catch (...) {
      leave();
      throw;
    }
    leave();
    if (is_over) return done();
    // The loop has ended. The thread that ends the agent completes its futures.
  }
  const auto wait = [&] {
    UniqueLock lock(mutex_);
    const auto ready = [this] { return done_.load(); };
    deadline.is_never() ? changed_.wait(lock, ready)
                        : void(changed_.wait_until(lock, deadline.point(), ready));
  };
  const auto execution_context = current_executor();
  Executor* const threads =
      thread_executor() != nullptr ? thread_executor() : execution_context.get();
  threads != nullptr ? threads->block(wait) : wait();
  return done();
}

void FutureCore::on_done(Task task, bool light) {
  if (!light) task = in_this_execution_context(std::move(task));
  UniqueLock lock(mutex_);
  const bool before_it = in_turn_ && runner_ != std::this_thread::get_id();
  const bool waits = !done_ || (before_it && !light);
  // It may block, so it must not run in this turn.
  const bool is_for_home = !waits && !light && executor_ && executor_->inside();
  if (!waits && !is_for_home) {
    lock.unlock();
    return task();
  }
  continuations_.push_back({std::move(task), light});
  if (waits || std::exchange(in_turn_, true)) return;
  lock.unlock();
  executor_->run(InOrder(shared_from_this()));
}

void FutureCore::run_in_order() {
  const trace::Range range(traced::continuations);
  const trace::ServeScope counted;
  const Turn turn(*this);
  // The context of the completing thread is not theirs; on_done() has bound each one to its own.
  const ExecutionContextScope none(nullptr);
  UniqueLock lock(mutex_);
  runner_ = std::this_thread::get_id();
  while (any_left()) {
    Task task = std::move(continuations_[next_++].task);
    lock.unlock();
    run_continuation(task);
    task = Task();  // destroyed without the lock: tasks own things
    if (turn.left()) return;
    lock.lock();
  }
  continuations_.clear();
  next_ = 0;
  in_turn_ = false;
  runner_ = {};
}

void FutureCore::drop_continuations() noexcept {
  std::vector<Continuation> dropped;
  {
    MutexLock lock(mutex_);
    dropped.swap(continuations_);
    next_ = 0;
    in_turn_ = false;
  }
  // Their promises fail, and so drop the continuations of other futures: of a long chain, one after
  // the other.
  Nesting::run([own = std::move(dropped)] {}, nullptr);
}

std::exception_ptr FutureCore::error() const {
  MutexLock lock(mutex_);
  return error_;
}

void FutureCore::rethrow_if_failed() const {
  if (const auto failure = error()) std::rethrow_exception(failure);
}

DeviceWorkRef FutureCore::device_work() const {
  MutexLock lock(mutex_);
  return work_;
}

void FutureCore::take() const {
  rethrow_if_failed();
  if (const auto work = device_work()) work->wait();
}

void FutureCore::complete(std::exception_ptr error, DeviceWorkRef work,
                          const std::function<void()>& store) {
  // A waiting thread may drop the promise and the future as soon as it sees done().
  const auto self = shared_from_this();
  const bool inside = executor_ && executor_->inside();
  std::vector<Task> at_once;
  bool driven = false;
  bool others = false;
  {
    MutexLock lock(mutex_);
    if (done_)
      throw Error(Blame::Caller, "a promise was set twice; it takes one value or one error");
    store();
    error_ = std::move(error);
    work_ = std::move(work);
    done_.store(true, std::memory_order_release);
    if (inside) {
      for (auto& continuation : continuations_) {
        if (continuation.light) at_once.push_back(std::move(continuation.task));
      }
      std::erase_if(continuations_,
                    [](const Continuation& continuation) { return continuation.light; });
    }
    others = in_turn_ = !continuations_.empty();
    driven = drivers_ > 0;
  }
  changed_.notify_all();
  if (driven) executor_->recall(this);
  for (auto& task : at_once) {
    Nesting::run([own = std::move(task)]() mutable { run_continuation(own); }, nullptr);
  }
  if (!others) return;
  InOrder rest(self);
  inside ? executor_->run(std::move(rest)) : Nesting::run(std::move(rest), executor_);
}

void throw_wait_timeout(const std::type_info& value, std::chrono::milliseconds timeout) {
  throw Error(Blame::Timeout,
              "the Future<" + type_name(value) + "> was not done within " + describe(timeout) +
                  "; its work goes on: wait again, or longer (a call has a limit of its own, "
                  "rpc::to(worker).timeout(…))");
}

void throw_no_state() {
  throw Error(Blame::Caller,
              "this future was default-constructed: it belongs to no call and no promise");
}

void throw_no_promise() { throw Error(Blame::Caller, "this promise is empty: it was moved from"); }

void throw_no_error() {
  throw Error(Blame::Caller,
              "a future cannot fail with a null std::exception_ptr; give the error, as "
              "std::make_exception_ptr(…), or a value");
}

void throw_no_function() {
  throw Error(Blame::Caller, "an empty function was given to a future as a continuation");
}

void log_lost_exception() noexcept {
  const Error error = to_error(std::current_exception(), Blame::Caller);
  log::error(
      std::string("an exception left a continuation of a future, where nobody can catch it: ") +
      error.what());
}

Future<void> when_all_done(std::vector<Future<void>> futures) {
  struct Gathered {
    explicit Gathered(std::size_t count) : missing(count) {}
    Mutex mutex;
    std::vector<DeviceWorkRef> works WEFT_GUARDED_BY(mutex);
    std::size_t missing WEFT_GUARDED_BY(mutex);
    bool ended WEFT_GUARDED_BY(mutex) = false;
  };
  if (futures.empty()) return Future<void>::ready();
  auto gathered = std::make_shared<Gathered>(futures.size());
  Promise<void> promise(executor_of(futures));
  auto result = promise.future();
  for (const Future<void>& future : futures) {
    future.on_done_light([gathered, promise](const Future<void>& one) {
      const auto error = one.error();
      std::vector<DeviceWorkRef> works;
      {
        MutexLock lock(gathered->mutex);
        if (gathered->ended) return;
        if (!error) gathered->works.push_back(one.device_work());
        if (!error && --gathered->missing > 0) return;
        gathered->ended = true;
        works = std::move(gathered->works);
      }
      if (error) {
        promise.set_error(error);
      } else {
        promise.set_with(join(std::move(works)), {});
      }
    });
  }
  return result;
}

}  // namespace weft::detail
