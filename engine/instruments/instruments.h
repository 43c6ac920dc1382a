// SPDX-License-Identifier: Apache-2.0
// Starts the instruments that the environment and the options ask for: WEFT_TIMELINE,
// WEFT_DUMP_DIR, WEFT_METRICS, WEFT_STATUS_FILE (docs/environment.md). They start when a process
// joins its first group or makes its first agent.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

struct InstrumentedRank {
  int rank = 0;
  int ranks = 0;         // 0: ranks join and leave
  std::string timeline;  // the file; "" for no timeline
};

// The timeline's file of a group or an agent: that of the option, otherwise that of WEFT_TIMELINE.
// Throws Caller if this process already writes a timeline to another file. Call it before anything
// waits.
std::string timeline_file(const std::string& option);

// Throws Caller if the ranks of a job do not make the same timeline: on each rank that makes one,
// and on each rank that makes none and calls after one that does. Ranks that make a timeline wait
// here for each other; the others do not wait. Throws Timeout.
void agree_on_file(const InstrumentedRank& participant, transport::Bootstrap& store,
                   Deadline deadline);

// Starts the instruments. If a timeline is wanted, blocks until the other ranks have called it too,
// to agree on the timeline's name and to compare clocks. Throws Caller for a variable that cannot
// be used, and for the errors of agree_on_file() with blame Caller. Other defects of the timeline
// are warnings.
//
// The group or the agent holds the result until it ends. When the last result in a process is
// destroyed, timeline parts that rank 0 cannot read are sent to it over this store
// (timeline_upload.h): the result keeps the store and `kept` alive until then.
std::shared_ptr<const void> start(const InstrumentedRank& participant,
                                  const std::shared_ptr<transport::Bootstrap>& store,
                                  std::vector<std::shared_ptr<const void>> kept, Deadline deadline);

}  // namespace weft::instruments
