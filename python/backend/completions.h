// SPDX-License-Identifier: Apache-2.0
// Threads that complete the futures of Python programs.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>

namespace weft::python {

// How many callbacks surround the code that asks for a future: 1 on the program's own threads.
std::size_t depth_of_future();

// Runs the task soon, on a thread that it may block: a callback that Python attached to a future
// may issue operations and wait for them. Tasks of one depth run one at a time and in their order,
// so that the callbacks of all ranks issue in the same order. Futures that a callback makes have
// their own threads, since it may wait for them. A task that takes longer than a second no longer
// holds the others up.
void complete_soon(std::size_t depth, std::function<void()> task);

// Blocks until all tasks have ended, or the limit has passed. Called without the GIL before the
// interpreter ends: a callback that runs then would end the process.
void await_completions(std::chrono::milliseconds limit);

}  // namespace weft::python
