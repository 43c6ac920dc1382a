// The flight recorder as JSON, on demand and when something went wrong. weft-debug analyze reads it
// (docs/looking-inside.md).
//
// A process writes a file when it gets SIGUSR1; with WEFT_DUMP_DIR set into that folder, and also
// when an operation has run out of time, lost its peer or its GPU, when ranks disagree on a
// collective, and when a group or an agent breaks.
#pragma once

#include <string>

#include <weft/base/error.h>

namespace weft::trace {

// What the flight recorder holds. Allocates; not for signal handlers.
std::string dump(const std::string& reason);

// This process takes part in that job from now on: ranks of one job say the same, those of two do
// not. Dumps name it, and so those of two jobs are told apart. (Of several the latest are kept.)
void joined_job(const std::string& id);

// Names this process: its pid is also that of others, in other PID namespaces and on other
// machines. A forked one has its own.
std::string process_identity();

// Writes dumps to the folder from now on, and installs the handler of SIGUSR1 as dump_on_signal()
// does; again for the same folder does nothing. Throws Caller where the folder cannot be made, Busy
// where the process can have no more descriptors or threads.
void dump_to(const std::string& folder);
// Installs the handler of SIGUSR1, unless the program has one or ignores it. Without dump_to() its
// dumps go to default_folder(). Throws Busy.
void dump_on_signal();
// "/tmp/weft-1000": this user's, among the temporary files.
std::string default_folder();
// Writes one where dump_to() was called. At most one a second for each process: failures come in
// swarms. (The newest file of a process holds all that the older ones do, but for what the ring has
// lost since: of many the first 8 and the newest 8 are kept.) The file's name, or "".
std::string dump_now(const std::string& reason) noexcept;
// The same after that error of something that is named; nothing where it was withdrawn.
void dump_after(const std::string& what, const Error& error) noexcept;
// Whether an error of one operation is that of a rank that is late or gone, or of a GPU, and no
// answer like another.
bool is_worth_a_dump(const Error& error) noexcept;

}  // namespace weft::trace
