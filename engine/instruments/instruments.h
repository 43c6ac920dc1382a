// What the environment and options ask for to look inside a running job: WEFT_TIMELINE,
// WEFT_DUMP_DIR, WEFT_METRICS, WEFT_STATUS_FILE (docs/environment.md). Started when a process joins
// its first group or makes its first agent.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

struct Participant {
  int rank = 0;
  int ranks = 0;         // 0: they come and go
  std::string timeline;  // the file; "" for none
};

// The file of a group or an agent: the option's, else WEFT_TIMELINE's. Throws Caller where this
// process makes a timeline in another one. Before anything waits.
std::string timeline_file(const std::string& option);

// Throws Caller where the ranks of a job do not make the same timeline, on each rank that makes one
// and on those without that come after one. Ranks that make one wait here for each other, the rest
// for nobody. Throws Timeout.
void agree_on_file(const Participant& participant, transport::Bootstrap& store, Deadline deadline);

// Blocks until the others have come as well, where a timeline is wanted: they agree on its name and
// their clocks. Throws Caller for a variable that cannot be done, and what agree_on_file() throws
// as Caller. What a timeline lacks otherwise is a warning.
//
// What it gives is held by the group or the agent until it ends. When the last of a process goes,
// parts of the timeline that lie where rank 0 cannot read them travel to it (parts.h), over this
// store: it, and `kept`, live until then.
std::shared_ptr<const void> start(const Participant& participant,
                                  const std::shared_ptr<transport::Bootstrap>& store,
                                  std::vector<std::shared_ptr<const void>> kept, Deadline deadline);

}  // namespace weft::instruments
