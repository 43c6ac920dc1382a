// SPDX-License-Identifier: Apache-2.0
// Finds out whether ranks that are lost have ended. The end of a connection does not prove that:
// after a cable was cut and mended, a living rank that has given this one up closes it too.
#pragma once

#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/membership/published.h>

namespace weft::group {

// Returns for each address whether a process listens there. False too if the machine does not
// answer; true if this process has no descriptor to ask with, or if the deadline had passed before
// that one was asked. Asks 64 at once, and blocks for a second or two if one of them listens or
// does not answer.
std::vector<bool> still_listen(const std::vector<Published>& addresses, Deadline deadline);

}  // namespace weft::group
