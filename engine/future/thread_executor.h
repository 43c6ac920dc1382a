// SPDX-License-Identifier: Apache-2.0
// The executor that owns this thread, independent of the call that it works for.
#pragma once

#include <weft/engine/future/executor.h>

namespace weft::detail {

// A thread that blocks tells this executor, so that another thread can take over. Null on threads
// that no executor owns; set by the executor.
Executor*& thread_executor();

}  // namespace weft::detail
