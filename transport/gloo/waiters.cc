// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/gloo/sigpipe.h>
#include <weft/transport/gloo/waiters.h>

namespace weft::transport::gloo {

namespace {

constexpr std::size_t kMostIdle = 16;  // most idle threads that are kept

}  // namespace

struct Waiters::State : std::enable_shared_from_this<State> {
  // Tasks that run one after another on one thread, from the first announcement until none is left.
  struct Queue {
    std::deque<Task> tasks;
    std::size_t announced = 0;  // calls of run() that are in `begin`
  };
  using QueuePointer = std::shared_ptr<Queue>;

  Mutex mutex;
  std::condition_variable changed;
  std::map<Stream, QueuePointer> streams WEFT_GUARDED_BY(mutex);
  // Queues that wait for a thread, which is idle or being started.
  std::deque<QueuePointer> unserved WEFT_GUARDED_BY(mutex);
  std::vector<std::thread> threads WEFT_GUARDED_BY(mutex);
  std::vector<std::thread> ended WEFT_GUARDED_BY(mutex);  // to be joined
  std::size_t idle WEFT_GUARDED_BY(mutex) = 0;
  bool stopping WEFT_GUARDED_BY(mutex) = false;

  void work() {
    const WithoutSigpipe quiet;
    UniqueLock lock(mutex);
    for (;;) {
      if (unserved.empty() && idle >= kMostIdle) return retire();
      ++idle;
      changed.wait(lock, [this]() WEFT_REQUIRES(mutex) { return stopping || !unserved.empty(); });
      --idle;
      if (unserved.empty()) return;
      const QueuePointer queue = std::move(unserved.front());
      unserved.pop_front();
      serve(*queue, lock);
      std::erase_if(streams, [&](const auto& one) { return one.second == queue; });
    }
  }

  void serve(Queue& queue, std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex) {
    for (;;) {
      changed.wait(lock, [&] { return !queue.tasks.empty() || queue.announced == 0; });
      if (queue.tasks.empty()) return;
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      lock.unlock();
      task();
      task = Task();
      lock.lock();
    }
  }

  // This thread ends, and is joined later.
  void retire() WEFT_REQUIRES(mutex) {
    const auto own = [](const std::thread& one) {
      return one.get_id() == std::this_thread::get_id();
    };
    const auto self = std::find_if(threads.begin(), threads.end(), own);
    if (self == threads.end()) return;  // the destructor joins it
    ended.push_back(std::move(*self));
    threads.erase(self);
  }

  // Gives the queue a thread. Throws Busy.
  void serve_later(const QueuePointer& queue) WEFT_REQUIRES(mutex) {
    if (idle <= unserved.size()) {
      try {
        threads.emplace_back([state = shared_from_this()] { state->work(); });
      } catch (const std::system_error& error) {
        throw system_error(Blame::Busy,
                           "cannot start a thread that waits for Gloo; allow this user, or the "
                           "container, more threads (ulimit -u, pids.max)",
                           error.code().value());
      }
    }
    unserved.push_back(queue);
  }
};

Waiters::Waiters() : state_(std::make_shared<State>()) {}

Waiters::~Waiters() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
    std::move(state_->ended.begin(), state_->ended.end(), std::back_inserter(threads));
    state_->ended.clear();
  }
  state_->changed.notify_all();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void Waiters::run(const Stream& stream, const std::function<Task()>& begin) {
  std::vector<std::thread> ended;
  State::QueuePointer queue;
  {
    MutexLock lock(state_->mutex);
    ended.swap(state_->ended);
    const auto found = state_->streams.find(stream);
    if (found != state_->streams.end()) {
      queue = found->second;
    } else if (state_->streams.size() >= kMostThreads) {
      throw Error(Blame::Busy,
                  "messages of " + std::to_string(kMostThreads) +
                      " ranks and tags are pending over gloo, and each of these needs a thread; "
                      "use fewer tags at a time, or the backend weft, which needs none");
    } else {
      queue = std::make_shared<State::Queue>();
      state_->serve_later(queue);
      state_->streams.emplace(stream, queue);
    }
    ++queue->announced;
  }
  for (std::thread& thread : ended) thread.join();
  Task task;
  try {
    task = begin();
  } catch (...) {
    UniqueLock lock(state_->mutex);
    --queue->announced;
    lock.unlock();
    state_->changed.notify_all();
    throw;
  }
  {
    MutexLock lock(state_->mutex);
    --queue->announced;
    queue->tasks.push_back(std::move(task));
  }
  state_->changed.notify_all();
}

void Waiters::run(Task task) {
  const auto queue = std::make_shared<State::Queue>();
  queue->tasks.push_back(std::move(task));
  {
    MutexLock lock(state_->mutex);
    state_->serve_later(queue);
  }
  state_->changed.notify_all();
}

}  // namespace weft::transport::gloo
