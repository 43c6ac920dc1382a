// From the parts that processes wrote to one file in Chrome's trace format, which Perfetto and
// chrome://tracing open: a process for each rank; rows for its threads, collectives, messages,
// calls and GPUs' streams; flow arrows from each send to its receive, from a call to where it is
// served and back, from a gradient to where it arrives and to what it starts, from a range to the
// operations begun in it and to what it has a GPU do, and from the rank that came last to a
// collective to the others.
//
// Times are the job's; how far each rank's clock may have been off when it was compared, at the
// job's start and, where rank 0 was there for it, at its end, stands in otherData and beside the
// rank's name.
#pragma once

#include <string>

namespace weft::trace::timeline {

struct Merged {
  int parts = 0;
  bool complete = false;  // every rank has written one, and ended in good order
};

// Merges the parts of `file` into it; the parts stay. Throws Caller where there are none, or those
// of several jobs, or the file cannot be written.
Merged merge(const std::string& file);

// The same, where no process writes a part any more; removes the parts if that is all there will
// be. Else, and where another process has merged already, does nothing.
void merge_if_last(const std::string& file);

// Removes the parts that another job has left behind and nobody writes any more.
void remove_leftovers(const std::string& file, const std::string& job);

}  // namespace weft::trace::timeline
