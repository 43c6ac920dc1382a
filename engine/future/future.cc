#include <weft/base/log.h>
#include <weft/engine/future/future.h>
#include <weft/profiling/trace/trace.h>

namespace weft::detail {

namespace traced {
namespace {
constinit trace::Name wait{trace::Layer::Engine, "wait"};  // as Work's
}  // namespace
}  // namespace traced

bool FutureCore::failed() const {
  std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

bool FutureCore::wait_until(Deadline deadline) const {
  if (done()) return true;
  const trace::Range waiting(traced::wait);
  if (home_) {
    {
      std::lock_guard lock(mutex_);
      ++drivers_;
    }
    const auto leave = [this] {
      std::lock_guard lock(mutex_);
      --drivers_;
    };
    try {
      if (home_->drive([this] { return done(); }, deadline) || deadline.passed()) return leave(), done();
    } catch (...) {
      leave();
      throw;
    }
    leave();  // the loop has ended: whoever ends the agent completes its futures
  }
  const auto wait = [&] {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return done_.load(); };
    deadline.is_never() ? changed_.wait(lock, ready) : void(changed_.wait_until(lock, deadline.point(), ready));
  };
  const auto threads = ambient_home();
  threads ? threads->block(wait) : wait();
  return done();
}

void FutureCore::on_done(Task task, bool light) {
  if (!light) task = in_this_ambient(std::move(task));
  {
    std::lock_guard lock(mutex_);
    if (!done_) {
      continuations_.push_back({std::move(task), light});
      return;
    }
  }
  task();
}

std::exception_ptr FutureCore::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void FutureCore::rethrow_if_failed() const {
  if (const auto failure = error()) std::rethrow_exception(failure);
}

DeviceWorkRef FutureCore::device_work() const {
  std::lock_guard lock(mutex_);
  return work_;
}

void FutureCore::take() const {
  rethrow_if_failed();
  if (const auto work = device_work()) work->wait();
}

void FutureCore::complete(std::exception_ptr error, DeviceWorkRef work, const std::function<void()>& store) {
  std::vector<Continuation> continuations;
  bool driven = false;
  {
    std::lock_guard lock(mutex_);
    if (done_) throw Error(Blame::Caller, "a promise was set twice; it takes one value or one error");
    store();
    error_ = std::move(error);
    work_ = std::move(work);
    done_.store(true, std::memory_order_release);
    continuations.swap(continuations_);
    driven = drivers_ > 0;
  }
  changed_.notify_all();
  const bool inside = home_ && home_->inside();
  if (driven && !inside) home_->recall();
  for (auto& [task, light] : continuations) {
    if (inside && !light) {
      home_->run(std::move(task));
    } else {
      task();
    }
  }
}

void throw_wait_timeout(std::chrono::milliseconds timeout) {
  throw Error(Blame::Timeout, "the future was not done within " + describe(timeout));
}

void throw_no_state() {
  throw Error(Blame::Caller, "this future was default-constructed: it belongs to no call and no promise");
}

void log_lost_exception() noexcept {
  const Error error = to_error(std::current_exception(), Blame::Caller);
  log::error(std::string("an exception left a function given to Future::on_done, where nobody can catch it: ") +
             error.what());
}

Future<void> when_all_done(std::vector<Future<void>> futures) {
  struct Gathered {
    std::mutex mutex;
    DeviceWorkRef work;
    std::size_t missing = 0;
    bool ended = false;
  };
  if (futures.empty()) return Future<void>::ready();
  auto gathered = std::make_shared<Gathered>();
  gathered->missing = futures.size();
  Promise<void> promise(futures.front().home());
  auto result = promise.future();
  for (const Future<void>& future : futures) {
    future.on_done_light([gathered, promise](const Future<void>& one) {
      const auto error = one.error();
      {
        std::lock_guard lock(gathered->mutex);
        if (gathered->ended) return;
        if (!error) gathered->work = join(gathered->work, one.device_work());
        if (!error && --gathered->missing > 0) return;
        gathered->ended = true;
      }
      if (error) {
        promise.set_error(error);
      } else {
        promise.set_with(gathered->work, {});
      }
    });
  }
  return result;
}

}  // namespace weft::detail
