// SPDX-License-Identifier: Apache-2.0
// Threads that complete the futures of Python programs.
#pragma once

#include <functional>

namespace weft::python {

// Runs the task soon, on a thread that it may block: a callback that Python attached to a future
// may wait for another future. A free thread always stands by, up to a bound.
void complete_soon(std::function<void()> task);

}  // namespace weft::python
