// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <pthread.h>
#include <unistd.h>

#include <ATen/ThreadLocalState.h>

#include <weft/python/backend/interpreter.h>

namespace weft::python {

namespace {

constexpr std::chrono::milliseconds kReturning(300);

std::atomic<unsigned long> main_thread{0};
std::atomic<bool> holds_waits{false};
std::atomic<std::chrono::steady_clock::time_point> last_return{};

// A call that runs on a thread of its own.
struct Call {
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  std::exception_ptr error;
};

}  // namespace

void set_main_thread(unsigned long id) { main_thread = id; }

bool on_main_thread() noexcept {
  return static_cast<unsigned long>(::pthread_self()) == main_thread.load();
}

void run_signal_handlers() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

bool interpreter_ends() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

void stay() noexcept {
  for (;;) ::pause();
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() == 0) return;
  returns_to_python_ = !on_main_thread() && PyGILState_GetThisThreadState() != nullptr;
  if (PyGILState_Check() != 0) released_.emplace();
}

WithoutGil::~WithoutGil() {
  if (!returns_to_python_) return;
  if (holds_waits || interpreter_ends()) stay();
  last_return = std::chrono::steady_clock::now();
}

void hold_waits() noexcept { holds_waits = true; }

void let_waits_return() noexcept {
  const auto until = last_return.load() + kReturning;
  if (std::chrono::steady_clock::now() < until) std::this_thread::sleep_until(until);
}

void interruptible(std::function<void()> function) {
  const WithoutGil unlocked;
  if (!on_main_thread()) return function();
  const auto call = std::make_shared<Call>();
  std::thread([call, state = at::ThreadLocalState(), function = std::move(function)] {
    std::exception_ptr error;
    try {
      const at::ThreadLocalStateGuard as_on_main_thread(state);
      function();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(call->mutex);
    call->error = error;
    call->has_ended = true;
    call->ended.notify_one();
  }).detach();
  std::unique_lock lock(call->mutex);
  while (!call->ended.wait_for(lock, kSignalPause, [&] { return call->has_ended; })) {
    lock.unlock();
    run_signal_handlers();
    lock.lock();
  }
  if (call->error) std::rethrow_exception(call->error);
}

}  // namespace weft::python
