// SPDX-License-Identifier: Apache-2.0
// The user's call to which the operations of this thread belong; see profiling/trace/called_by.h.
#pragma once

#include <weft/profiling/trace/called_by.h>

namespace weft::group {

using trace::CalledBy;

}  // namespace weft::group
