#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <weft/base/error.h>
#include <weft/transport/gloo/sigpipe.h>
#include <weft/transport/gloo/waiters.h>

namespace weft::transport::gloo {

struct Waiters::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  std::vector<std::thread> threads;
  std::size_t idle = 0;
  std::size_t beginning = 0;  // in run(), and a thread is theirs
  bool stopping = false;

  void work() {
    const WithoutSigpipe quiet;
    std::unique_lock lock(mutex);
    for (;;) {
      ++idle;
      changed.wait(lock, [this] { return stopping || !tasks.empty(); });
      --idle;
      if (tasks.empty()) return;
      Task task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = Task();
      lock.lock();
    }
  }
};

Waiters::Waiters() : state_(std::make_shared<State>()) {}

Waiters::~Waiters() {
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
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

void Waiters::run(const std::function<Task()>& begin) {
  try {
    std::lock_guard lock(state_->mutex);
    const std::size_t spoken_for = state_->tasks.size() + state_->beginning;
    if (spoken_for >= state_->idle) state_->threads.emplace_back([state = state_] { state->work(); });
    ++state_->beginning;
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy,
                       "no thread to wait for Gloo; allow this user, or the container, more of them (ulimit -u, pids.max)",
                       error.code().value());
  }
  Task task;
  try {
    task = begin();
  } catch (...) {
    std::lock_guard lock(state_->mutex);
    --state_->beginning;
    throw;
  }
  {
    std::lock_guard lock(state_->mutex);
    --state_->beginning;
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_one();
}

}  // namespace weft::transport::gloo
