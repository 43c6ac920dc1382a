// SPDX-License-Identifier: Apache-2.0
#include <system_error>
#include <utility>

#include <pthread.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/op.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/group/continuations.h>

namespace weft::group {

using weft::detail::thread_executor;

namespace {

constexpr int kAtOnce = 4;  // threads that run tasks, not counting those that block

}  // namespace

bool Continuations::inside() const { return Op::ending(); }

bool Continuations::drive(const std::function<bool()>& done, Deadline, const void*) {
  if (inside()) {
    throw Error(
        Blame::Caller,
        "a function that runs when an operation ends (Op::on_ended) would block on a future, "
        "on a backend's thread; use then()");
  }
  return done();
}

void Continuations::block(const std::function<void()>& wait) {
  if (thread_executor() != this) return wait();
  {
    MutexLock lock(mutex_);
    ++blocked_;
    call_another();
  }
  struct Back {
    Continuations& executor;
    ~Back() {
      MutexLock lock(executor.mutex_);
      --executor.blocked_;
    }
  } back{*this};
  wait();
}

void Continuations::run(Task task) {
  UniqueLock lock(mutex_);
  if (!stopping_) {
    tasks_.push_back(std::move(task));
    call_another();
    if (!threads_.empty()) return;
    // No thread could be started, so the task runs on this one. If this is a backend's thread,
    // drive() refuses to block it.
    task = std::move(tasks_.back());
    tasks_.pop_back();
  }
  lock.unlock();
  task();
}

void Continuations::call_another() {
  if (tasks_.empty()) return;
  if (static_cast<int>(tasks_.size()) <= idle_) return changed_.notify_one();
  if (static_cast<int>(threads_.size()) - blocked_ >= kAtOnce) return;
  try {
    threads_.emplace_back([self = shared_from_this()] { self->work(); });
  } catch (const std::system_error& error) {
    log::error(std::string(
                   "cannot start a thread for the continuations of operations (Work::future()): ") +
               error.what());
  }
}

void Continuations::work() {
  pthread_setname_np(pthread_self(), "weft-then");
  thread_executor() = this;
  UniqueLock lock(mutex_);
  for (;;) {
    if (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = Task();  // destroyed without the lock
      lock.lock();
    } else if (stopping_) {
      return;
    } else {
      ++idle_;
      changed_.wait(lock);
      --idle_;
    }
  }
}

void Continuations::stop(bool waits) {
  UniqueLock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  // Tasks that block may have started more threads meanwhile.
  while (!threads_.empty()) {
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    if (!waits || thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
    lock.lock();
  }
}

}  // namespace weft::group
