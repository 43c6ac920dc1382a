// What the environment asks for to look inside a running job: WEFT_TIMELINE, WEFT_DUMP_DIR, WEFT_METRICS, WEFT_STATUS_FILE
// (docs/environment.md). Started when a process joins its first group or makes its first agent.
#pragma once

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

struct Participant {
  int rank = 0;
  int ranks = 0;  // 0: they come and go
};

// Blocks until the others have come as well, where a timeline is wanted: they agree on its name and their clocks. Throws
// Caller for a variable that cannot be done. What a timeline lacks otherwise is a warning.
void start(const Participant& participant, transport::Bootstrap& store, Deadline deadline);

}  // namespace weft::instruments
