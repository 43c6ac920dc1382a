// SPDX-License-Identifier: Apache-2.0
// Merges the parts that processes wrote into one file in Chrome's trace format, which Perfetto and
// chrome://tracing open: a process for each rank; rows for its threads, collectives, messages,
// calls and GPU streams; flow arrows from each send to its receive, from a call to the incoming
// call and back, from a gradient to where it arrives and to what it starts, from a range to the
// operations and the GPU work that it starts, and from the rank that joined a collective last to
// the others.
//
// Times are the job's. otherData and the rank's name say by how much each rank's clock may have
// been off when it was compared: at the job's start and, if rank 0 answered then, at its end.
#pragma once

#include <string>

namespace weft::trace::timeline {

struct Merged {
  int parts = 0;
  bool complete = false;  // every rank has written a part and ended in good order
};

// Merges the parts of `file` into it and keeps the parts. Throws Caller if there are no parts, if
// they belong to several jobs, or if the file cannot be written.
Merged merge(const std::string& file);

// Merges the parts if no process writes one any more; removes them if no more parts will follow.
// Otherwise, or if another process has merged already, does nothing.
void merge_if_last(const std::string& file);

// Removes the parts of other jobs that no process writes any more.
void remove_leftovers(const std::string& file, const std::string& job);

}  // namespace weft::trace::timeline
