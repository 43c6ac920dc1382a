// weft::begin_step: where a training step begins.
#pragma once

#include <weft/base/export.h>

namespace weft {

// A training step begins, on any thread: `weft-run --status`, /metrics (weft_steps_total) and the
// timeline count from one to the next. For programs without DistributedDataParallel, whose forward
// passes say so themselves. `rank`: whose, where threads of one process are ranks. Costs an atomic
// increment, and with --status or /metrics a lock that is held for some instructions.
WEFT_API void begin_step(int rank = -1) noexcept;

}  // namespace weft
