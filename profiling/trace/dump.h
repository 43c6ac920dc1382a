// SPDX-License-Identifier: Apache-2.0
// Writes the flight recorder as JSON, on demand and after errors. weft-debug analyze reads it by
// profiling/tools/dumps.h (docs/looking-inside.md).
//
// A process writes a file when it gets SIGUSR1, into WEFT_DUMP_DIR if that is set. With
// WEFT_DUMP_DIR it also writes one when an operation has timed out, lost its peer or its GPU, when
// ranks disagree on a collective, and when a group or an agent breaks.
#pragma once

#include <string>

#include <weft/base/error.h>

namespace weft::trace {

// Returns the contents of the flight recorder as JSON. Allocates, so signal handlers must not call
// it.
std::string dump(const std::string& reason);

// Records that this process takes part in the job `id`. Ranks of one job pass the same id, those of
// two jobs different ones. Dumps name the jobs, so that dumps of two jobs can be told apart. Keeps
// the latest ids.
void joined_job(const std::string& id);

// A name for this process, because processes in other PID namespaces and on other machines may have
// the same pid. A forked process has a name of its own.
std::string process_identity();

// Writes dumps to the folder from now on, and installs the handler of SIGUSR1 as dump_on_signal()
// does; a second call for the same folder does nothing. Throws Caller if the folder cannot be made,
// Busy if the process can have no more descriptors or threads.
void dump_to(const std::string& folder);
// Installs the handler of SIGUSR1, unless the program has one or ignores it. Without dump_to() its
// dumps go to default_folder(). Throws Busy.
void dump_on_signal();
// The folder of this user among the temporary files, such as "/tmp/weft-1000".
std::string default_folder();
// Writes a dump if dump_to() was called, at most one a second for each process, because failures
// come in groups. Returns the file's name, or "". (The newest file of a process contains everything
// in the older ones except records that the ring has dropped since, so only the first 8 and the
// newest 8 files are kept.)
std::string dump_now(const std::string& reason) noexcept;
// Calls dump_now() after `what` failed with `error`; does nothing for Blame::Cancelled.
void dump_after(const std::string& what, const Error& error) noexcept;
// Whether an operation's error points to a late or lost rank or a GPU, and is not an ordinary
// result.
bool is_worth_a_dump(const Error& error) noexcept;

}  // namespace weft::trace
