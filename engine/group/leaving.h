// SPDX-License-Identifier: Apache-2.0
// How a rank leaves a group: it waits for its own operations, and then until the others have
// completed those in which it took part (ledger.h), because closing the connections would throw
// away bytes that are on their way. Internal.
#pragma once

#include <chrono>

namespace weft::group {

struct Core;

// Implements ProcessGroup::leave(). Blocks, at most for `limit`; then throws Timeout. Throws Caller
// if this rank has left before. Like leave_at_last(), tells the others at once and does not wait if
// an exception unwinds the stack.
void leave(Core& core, std::chrono::milliseconds limit);
// Leaves within the group's timeout, unless leave() was called. Logs the operations that did not
// end in time. For the thread that drops the last handle.
void leave_at_last(Core& core);

}  // namespace weft::group
