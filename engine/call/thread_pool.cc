// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <weft/base/crash.h>
#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/thread_pool.h>
#include <weft/engine/call/wait_all.h>
#include <weft/engine/future/thread_executor.h>

namespace weft::call {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::microseconds(200);
// How long the lookout stays awake after the last task.
constexpr auto kAlert = std::chrono::milliseconds(10);
constexpr auto kIdle = std::chrono::seconds(5);  // after this, threads beyond the limit end

using weft::detail::thread_executor;
thread_local bool running = false;             // whether this thread is a pool's and runs a task
thread_local bool running_has_waited = false;  // see has_waited()

}  // namespace

// While it lives, this thread blocks and does not count.
class ThreadPool::Blocked {
 public:
  explicit Blocked(ThreadPool& thread_pool)
      : thread_pool_(thread_pool), counts_(thread_executor() == &thread_pool && running) {
    if (!counts_) return;
    UniqueLock lock(thread_pool_.mutex_);
    thread_pool_.queue_.block();
    thread_pool_.refuse_if_too_many_block(lock);
    if (thread_pool_.queue_.has_tasks()) thread_pool_.call_another(lock);
  }
  ~Blocked() {
    if (!counts_) return;
    MutexLock lock(thread_pool_.mutex_);
    thread_pool_.queue_.unblock();
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  ThreadPool& thread_pool_;
  const bool counts_;
};

ThreadPool::ThreadPool(std::string name, int threads, std::shared_ptr<EventLoop> loop)
    : name_(std::move(name)),
      loop_(std::move(loop)),
      queue_(threads, trace::depth(trace::Queue::Handlers, name_)) {}

std::shared_ptr<ThreadPool> ThreadPool::make(std::string name, int threads,
                                             std::shared_ptr<EventLoop> loop) {
  std::shared_ptr<ThreadPool> thread_pool(
      new ThreadPool(std::move(name), threads, std::move(loop)));
  UniqueLock lock(thread_pool->mutex_);
  try {
    thread_pool->call_another(lock);
  } catch (const std::system_error& error) {
    throw system_error(
        Blame::Busy,
        "agent '" + thread_pool->name_ +
            "' cannot start a thread; raise the limit of threads of this user or container "
            "(ulimit -u, pids.max)",
        error.code().value());
  }
  return thread_pool;
}

bool ThreadPool::drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) {
  if (made_in_.is_inherited()) made_in_.throw_inherited("agent " + name_);
  if (loop_->inside()) {
    throw Error(Blame::Caller,
                "a function on the agent's loop waits for something that only this loop can bring: "
                "call the function without rpc::inline_, or let it return a Future and go on in a "
                "continuation");
  }
  const Blocked blocked(*this);
  // The calls that come in this thread's turns are others': they run as on any thread, in none of
  // the caller's modes.
  const c10::InferenceMode no_inference(/*enabled=*/false);
  const c10::impl::ForceDispatchKeyGuard no_mode(c10::default_included_set,
                                                 c10::default_excluded_set);
  const detail::Untracked untracked;
  return loop_->drive(done, deadline, awaited);
}

void ThreadPool::block(const std::function<void()>& wait) {
  const Blocked blocked(*this);
  wait();
}

void ThreadPool::run(Task task) { add({std::move(task), {}}); }

void ThreadPool::run_call(Task task, Refuse refuse) { add({std::move(task), std::move(refuse)}); }

bool ThreadPool::has_waited() { return running_has_waited; }

void ThreadPool::run_beside(Task task) { add({std::move(task), {}, /*is_beside=*/true}); }

void ThreadPool::add(TaskQueue::Waiting waiting) {
  if (made_in_.is_inherited()) return;
  UniqueLock lock(mutex_);
  if (queue_.closed()) return;
  queue_.add(std::move(waiting));
  refuse_if_too_many_block(lock);
  if (queue_.closed()) return;
  // The thread that turns the loop for the thread pool finds the task when it leaves its turn. Any
  // other thread must call one, unless the task has to wait for those that run.
  if (thread_executor() == this && !running && loop_->inside()) return;
  if (queue_.may_run() || (!serving_ && !looking_)) call_another(lock);
}

// Has a thread take the tasks that wait: one that sleeps, or a new one; or else the one that serves
// the loop.
void ThreadPool::call_another(std::unique_lock<std::mutex>& lock) {
  if (idle_ > 0 || looking_) {
    changed_.notify_one();
  } else if (queue_.may_grow(threads_.size())) {
    try {
      threads_.start(Task([self = shared_from_this()] { self->work(); }));
      is_short_of_threads_ = false;
    } catch (const std::system_error& error) {
      if (threads_.size() == 0) throw;  // make() catches it
      if (!std::exchange(is_short_of_threads_, true)) {
        log::error("agent '" + name_ + "' has no thread for a call that waits: " + error.what());
      }
      if (threads_.size() == queue_.blocked()) {
        refuse_calls(
            lock,
            "all its " + std::to_string(queue_.blocked()) +
                " threads wait for calls and futures, and no other can be started (" +
                error.what() +
                "); raise the limit of threads of this user or container (ulimit -u, pids.max)");
      }
    }
  }
  if (serving_ && queue_.may_run()) {
    lock.unlock();
    loop_->recall();
    lock.lock();
  }
}

void ThreadPool::refuse_if_too_many_block(std::unique_lock<std::mutex>& lock) {
  if (!queue_.must_refuse()) return;
  refuse_calls(lock, std::to_string(queue_.blocked()) +
                         " of its threads wait for calls and futures, and no more than " +
                         std::to_string(queue_.most_blocked()) +
                         " may; nest calls less deep, or issue fewer at a time");
}

// Refuses the calls that wait. It does so in a turn of the loop, because continuations of their
// failure must not run on a thread that is about to block.
void ThreadPool::refuse_calls(std::unique_lock<std::mutex>& lock, const std::string& why) {
  std::vector<TaskQueue::Waiting> refused = queue_.take_calls();
  if (refused.empty()) return;
  lock.unlock();
  const Error busy(
      Blame::Busy,
      "agent '" + name_ + "' cannot run it now: " + why +
          "; or have the functions return a Future, or be coroutines: then they hold no thread "
          "while they wait");
  loop_->post(Task([refused = std::move(refused), busy] {
    for (const TaskQueue::Waiting& waiting : refused) waiting.refuse(busy);
  }));
  lock.lock();
}

void ThreadPool::work() {
  thread_executor() = this;
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  log::set_thread_label(name_);
  crash::prepare_thread();
  UniqueLock lock(mutex_);
  for (;;) {
    if (queue_.closed()) break;
    if (queue_.may_run() && !overdue_) {
      run_one(lock);
    } else if (!serving_) {
      serve(lock);
    } else if (!rest(lock)) {
      break;
    }
  }
  std::thread before = threads_.leave();
  lock.unlock();
  if (before.joinable()) before.join();
}

void ThreadPool::run_one(std::unique_lock<std::mutex>& lock) {
  TaskQueue::Waiting own = queue_.take();
  const bool is_beside = own.is_beside;
  if (is_beside) refuse_if_too_many_block(lock);
  if (!looking_ && !serving_) call_another(lock);  // it becomes the lookout
  lock.unlock();
  running = true;
  running_has_waited = own.has_waited;
  own.task();
  own = {};
  running = running_has_waited = false;
  lock.lock();
  queue_.finish(is_beside);
  last_work_ = Clock::now();
}

void ThreadPool::serve(std::unique_lock<std::mutex>& lock) {
  serving_ = true;
  overdue_ = false;
  ++served_;
  const std::atomic<bool>& wanted = queue_.wanted();
  lock.unlock();
  // Serves one turn at least.
  loop_->serve([&wanted, first = true]() mutable {
    return !std::exchange(first, false) && wanted.load(std::memory_order_relaxed);
  });
  lock.lock();
  serving_ = false;
}

// False if this thread should end.
bool ThreadPool::rest(std::unique_lock<std::mutex>& lock) {
  if (!looking_) {
    looking_ = true;
    look_out(lock);
    looking_ = false;
    if (queue_.closed() || queue_.may_run() || !serving_) return true;
  }
  ++idle_;
  const auto woken = changed_.wait_for(lock, kIdle);
  --idle_;
  // A thread whose time is over may have taken another's notification with it
  // (pthread_cond_timedwait(3p)), and nobody sends a second one.
  return woken == std::cv_status::no_timeout || !serving_ || queue_.may_run() ||
         queue_.needs(threads_.size());
}

// Waits until the others have left something undone between two looks: a task that could have run,
// or a loop that nobody has served. Gives up when nothing has been done for a while.
void ThreadPool::look_out(std::unique_lock<std::mutex>& lock) {
  while (!queue_.closed() && (queue_.busy() > 0 || Clock::now() - last_work_ < kAlert)) {
    const auto served = served_;
    const bool could_run = queue_.may_run();
    const bool unserved = !serving_;
    if (changed_.wait_for(lock, kLook) == std::cv_status::no_timeout) return;
    overdue_ = unserved && !serving_ && served == served_;
    if (overdue_ || (could_run && queue_.may_run())) return;
  }
}

void ThreadPool::stop() {
  UniqueLock lock(mutex_);
  auto dropped = queue_.close();
  changed_.notify_all();
  lock.unlock();
  dropped.clear();  // outside the lock, because tasks own things
  loop_->recall();
  lock.lock();
  const int own = thread_executor() == this ? 1 : 0;
  threads_.wait(lock, own);
  std::thread last = own == 0 ? threads_.take_last() : std::thread();
  lock.unlock();
  if (last.joinable()) last.join();
}

void ThreadPool::limit_blocked(int threads) {
  MutexLock lock(mutex_);
  queue_.limit_blocked(threads);
}

std::size_t ThreadPool::waiting() const {
  MutexLock lock(mutex_);
  return queue_.waiting();
}

bool ThreadPool::is_full() const {
  MutexLock lock(mutex_);
  return queue_.is_full();
}

std::size_t ThreadPool::active() const {
  MutexLock lock(mutex_);
  return static_cast<std::size_t>(queue_.busy()) + queue_.waiting();
}

}  // namespace weft::call
