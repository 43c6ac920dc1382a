// SPDX-License-Identifier: Apache-2.0
// weft::begin_step: marks where a training step begins.
#pragma once

#include <weft/base/export.h>

namespace weft {

// Marks the beginning of a training step, on any thread: `weft-run --status`, /metrics
// (weft_steps_total) and the timeline count from one to the next. For programs without
// DistributedDataParallel, whose forward passes mark steps themselves. `rank` says which rank
// begins the step if threads of one process are ranks. Costs an atomic increment, and with --status
// or /metrics a lock that is held for some instructions.
WEFT_API void begin_step(int rank = -1) noexcept;

}  // namespace weft
