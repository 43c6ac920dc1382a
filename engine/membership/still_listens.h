// SPDX-License-Identifier: Apache-2.0
// Finds out whether a rank that is lost has ended. The end of its connection does not prove that:
// after a cable was cut and mended, a living rank that has given this one up closes it too.
#pragma once

#include <weft/base/deadline.h>
#include <weft/engine/membership/published.h>

namespace weft::group {

// True if a process listens at the address. Blocks for a second if it does, or if its machine does
// not answer, and never beyond the deadline.
bool still_listens(const Published& address, Deadline deadline);

}  // namespace weft::group
