// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include <c10/core/InferenceMode.h>

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
    ++thread_pool_.blocked_;
    thread_pool_.note();
    thread_pool_.refuse_if_too_many_block(lock);
    if (!thread_pool_.tasks_.empty()) thread_pool_.call_another(lock);
  }
  ~Blocked() {
    if (!counts_) return;
    MutexLock lock(thread_pool_.mutex_);
    --thread_pool_.blocked_;
    thread_pool_.note();
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  ThreadPool& thread_pool_;
  const bool counts_;
};

ThreadPool::ThreadPool(std::string name, int threads, std::shared_ptr<EventLoop> loop)
    : name_(std::move(name)),
      limit_(threads),
      loop_(std::move(loop)),
      waiting_(trace::depth(trace::Queue::Handlers, name_)) {}

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
  const c10::InferenceMode no_mode(/*enabled=*/false);
  const detail::Untracked untracked;
  return loop_->drive(done, deadline, awaited);
}

void ThreadPool::block(const std::function<void()>& wait) {
  const Blocked blocked(*this);
  wait();
}

void ThreadPool::run(Task task) { add(&ThreadPool::tasks_, {std::move(task), {}}); }

void ThreadPool::run_call(Task task, Refuse refuse) {
  add(&ThreadPool::tasks_, {std::move(task), std::move(refuse)});
}

bool ThreadPool::has_waited() { return running_has_waited; }

void ThreadPool::run_beside(Task task) { add(&ThreadPool::beside_, {std::move(task), {}}); }

void ThreadPool::add(std::deque<Waiting> ThreadPool::*tasks, Waiting waiting) {
  if (made_in_.is_inherited()) return;
  UniqueLock lock(mutex_);
  if (stopping_) return;
  (this->*tasks).push_back(std::move(waiting));
  (this->*tasks).back().has_waited = !has_room();
  waiting_.add(1);
  note();
  refuse_if_too_many_block(lock);
  if (stopping_) return;
  // The thread that turns the loop for the thread pool finds the task when it leaves its turn. Any
  // other thread must call one, unless the task has to wait for those that run.
  if (thread_executor() == this && !running && loop_->inside()) return;
  if (may_run() || (!serving_ && !looking_)) call_another(lock);
}

// Has a thread take the tasks that wait: one that sleeps, or a new one; or else the one that serves
// the loop.
void ThreadPool::call_another(std::unique_lock<std::mutex>& lock) {
  if (idle_ > 0 || looking_) {
    changed_.notify_one();
  } else if (may_grow()) {
    try {
      std::thread thread([self = shared_from_this()] { self->work(); });
      threads_.emplace(thread.get_id(), std::move(thread));
      is_short_of_threads_ = false;
    } catch (const std::system_error& error) {
      if (threads_.empty()) throw;  // make() catches it
      if (!std::exchange(is_short_of_threads_, true)) {
        log::error("agent '" + name_ + "' has no thread for a call that waits: " + error.what());
      }
      if (threads() == blocked_) {
        refuse_calls(
            lock,
            "all its " + std::to_string(blocked_) +
                " threads wait for calls and futures, and no other can be started (" +
                error.what() +
                "); raise the limit of threads of this user or container (ulimit -u, pids.max)");
      }
    }
  }
  if (serving_ && may_run()) {
    lock.unlock();
    loop_->recall();
    lock.lock();
  }
}

void ThreadPool::refuse_if_too_many_block(std::unique_lock<std::mutex>& lock) {
  if (blocked_ < most_blocked_ || tasks_.empty()) return;
  refuse_calls(lock, std::to_string(blocked_) +
                         " of its threads wait for calls and futures, and no more than " +
                         std::to_string(most_blocked_) +
                         " may; nest calls less deep, or issue fewer at a time");
}

// Refuses the calls that wait. It does so in a turn of the loop, because continuations of their
// failure must not run on a thread that is about to block.
void ThreadPool::refuse_calls(std::unique_lock<std::mutex>& lock, const std::string& why) {
  const auto calls = std::stable_partition(tasks_.begin(), tasks_.end(),
                                           [](const Waiting& waiting) { return !waiting.refuse; });
  if (calls == tasks_.end()) return;
  std::vector<Waiting> refused(std::make_move_iterator(calls),
                               std::make_move_iterator(tasks_.end()));
  tasks_.erase(calls, tasks_.end());
  waiting_.add(-static_cast<std::int64_t>(refused.size()));
  note();
  lock.unlock();
  const Error busy(
      Blame::Busy,
      "agent '" + name_ + "' cannot run it now: " + why +
          "; or have the functions return a Future, or be coroutines: then they hold no thread "
          "while they wait");
  loop_->post(Task([refused = std::move(refused), busy] {
    for (const Waiting& waiting : refused) waiting.refuse(busy);
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
    if (stopping_) break;
    if (may_run() && !overdue_) {
      run_one(lock);
    } else if (!serving_) {
      serve(lock);
    } else if (!rest(lock)) {
      break;
    }
  }
  auto own = threads_.extract(std::this_thread::get_id());
  std::thread before = std::exchange(last_, std::move(own.mapped()));
  ended_.notify_all();
  lock.unlock();
  if (before.joinable()) before.join();
}

void ThreadPool::run_one(std::unique_lock<std::mutex>& lock) {
  const bool is_beside = may_run_beside();
  std::deque<Waiting>& tasks = is_beside ? beside_ : tasks_;
  Waiting own = std::move(tasks.front());
  tasks.pop_front();
  waiting_.add(-1);
  ++busy_;
  if (is_beside) {
    ++blocked_;
    ++busy_beside_;
  }
  note();
  if (is_beside) refuse_if_too_many_block(lock);
  if (!looking_ && !serving_) call_another(lock);  // it becomes the lookout
  lock.unlock();
  running = true;
  running_has_waited = own.has_waited;
  own.task();
  own = {};
  running = running_has_waited = false;
  lock.lock();
  --busy_;
  if (is_beside) {
    --blocked_;
    --busy_beside_;
  }
  note();
  last_work_ = Clock::now();
}

void ThreadPool::serve(std::unique_lock<std::mutex>& lock) {
  serving_ = true;
  overdue_ = false;
  ++served_;
  lock.unlock();
  // Serves one turn at least.
  loop_->serve([this, first = true]() mutable {
    return !std::exchange(first, false) && wanted_.load(std::memory_order_relaxed);
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
    if (stopping_ || may_run() || !serving_) return true;
  }
  ++idle_;
  const auto woken = changed_.wait_for(lock, kIdle);
  --idle_;
  // A thread whose time is over may have taken another's notification with it
  // (pthread_cond_timedwait(3p)), and nobody sends a second one.
  return woken == std::cv_status::no_timeout || !serving_ || may_run() ||
         threads() - blocked_ <= limit_ + 2;
}

// Waits until the others have left something undone between two looks: a task that could have run,
// or a loop that nobody has served. Gives up when nothing has been done for a while.
void ThreadPool::look_out(std::unique_lock<std::mutex>& lock) {
  while (!stopping_ && (busy_ > 0 || Clock::now() - last_work_ < kAlert)) {
    const auto served = served_;
    const bool could_run = may_run();
    const bool unserved = !serving_;
    if (changed_.wait_for(lock, kLook) == std::cv_status::no_timeout) return;
    overdue_ = unserved && !serving_ && served == served_;
    if (overdue_ || (could_run && may_run())) return;
  }
}

void ThreadPool::stop() {
  std::deque<Waiting> dropped;
  UniqueLock lock(mutex_);
  stopping_ = true;
  wanted_ = true;
  dropped.swap(tasks_);
  for (Waiting& waiting : beside_) dropped.push_back(std::move(waiting));
  beside_.clear();
  waiting_.add(-static_cast<std::int64_t>(dropped.size()));
  changed_.notify_all();
  lock.unlock();
  dropped.clear();  // outside the lock, because tasks own things
  loop_->recall();
  lock.lock();
  const int own = thread_executor() == this ? 1 : 0;
  ended_.wait(lock, [&]() WEFT_REQUIRES(mutex_) { return threads() <= own; });
  std::thread last = own == 0 ? std::exchange(last_, std::thread()) : std::thread();
  lock.unlock();
  if (last.joinable()) last.join();
}

ThreadPool::~ThreadPool() {
  if (!last_.joinable()) return;
  // One of its own threads has called stop() and was the last to leave. It may be the one that
  // destroys the pool.
  if (last_.get_id() == std::this_thread::get_id()) {
    last_.detach();
  } else {
    last_.join();
  }
}

void ThreadPool::limit_blocked(int threads) {
  MutexLock lock(mutex_);
  most_blocked_ = threads;
}

std::size_t ThreadPool::waiting() const {
  MutexLock lock(mutex_);
  return tasks_.size() + beside_.size();
}

bool ThreadPool::is_full() const {
  MutexLock lock(mutex_);
  return busy_ - blocked_ + static_cast<int>(tasks_.size()) > limit_;
}

std::size_t ThreadPool::active() const {
  MutexLock lock(mutex_);
  return static_cast<std::size_t>(busy_) + tasks_.size() + beside_.size();
}

}  // namespace weft::call
