// SPDX-License-Identifier: Apache-2.0
// Waiting in a process that runs Python: the GIL is released, and Ctrl-C ends the wait.
#pragma once

#include <chrono>
#include <functional>
#include <optional>

#include <torch/csrc/utils/pybind.h>

namespace weft::python {

// How often a wait on the main thread looks for signals.
constexpr std::chrono::milliseconds kSignalPause(100);

// Says that the calling thread is Python's main thread, on which signal handlers run. Called when
// the module is imported, and in a forked child.
void set_main_thread(unsigned long id);

// True if signals can be seen on this thread.
bool on_main_thread() noexcept;

// Runs the handlers of signals that have come. Throws what a handler raised (KeyboardInterrupt).
// Takes the GIL.
void run_signal_handlers();

// True from the moment at which the interpreter ends, when no thread but the main one gets the GIL.
bool interpreter_ends() noexcept;

// Called on the main thread when the program and its callbacks have ended, before the interpreter
// does: waits of other threads, which are daemons by then, return no more.
void hold_waits() noexcept;

// Blocks for a moment if a wait of another thread has returned just now: libtorch releases and
// takes the GIL when that thread drops its Work, and must have done so before the interpreter ends.
void let_waits_return() noexcept;

// Blocks for ever. A thread that asks for the GIL while the interpreter ends is ended by CPython
// from within C++ code, and that ends the process.
[[noreturn]] void stay() noexcept;

// Releases the GIL while it lives, if this thread holds it. A thread of Python's that would return
// to a program that has ended stays in the destructor.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  bool returns_to_python_ = false;
  std::optional<py::gil_scoped_release> released_;
};

// Calls a function that blocks, without the GIL. On the main thread the function runs on a thread
// of its own with the main thread's modes (inference, grad, …), so that Ctrl-C ends the wait; the
// function then goes on and its result is dropped.
void interruptible(std::function<void()> function);

}  // namespace weft::python
