// SPDX-License-Identifier: Apache-2.0
// Threads that complete the futures of Python programs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace weft::python {

// Returns the depth of a future for which this thread asks: 1 on the program's own threads, and in
// a callback one more than the depth of the callback's future.
std::size_t depth_of_future();

// An operation, whose future has callbacks: the backend that issued it, and its number there.
struct Cause {
  const void* group = nullptr;
  std::uint64_t number = 0;
};
// The operation whose future's callback this thread runs; nullopt on the program's own threads.
std::optional<Cause> cause_of_callback();

// Completes the future of that operation: runs the task soon, on a thread that it may block: a
// callback that Python attached to a future may issue operations and wait for them. Tasks of one
// depth run one at a time and in their order, so that the callbacks of all ranks issue in the same
// order. Futures that a callback makes have their own threads, since it may wait for them. A task
// that takes longer than a second no longer holds the others up.
void complete_soon(std::size_t depth, const Cause& cause, std::function<void()> task);

// Blocks until all tasks have ended, or the limit has passed. Called without the GIL before the
// interpreter ends: a callback that runs then would end the process.
void await_completions(std::chrono::milliseconds limit);

}  // namespace weft::python
