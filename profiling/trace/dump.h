// The flight recorder as JSON, on demand and when something went wrong. weft-debug analyze reads it
// (docs/looking-inside.md).
//
// With WEFT_DUMP_DIR set, a process writes a file there when an operation has run out of time or lost its peer, when a
// group or an agent breaks, and when it gets SIGUSR1; without it nothing is written and no signal is touched.
#pragma once

#include <string>

#include <weft/base/error.h>

namespace weft::trace {

// What the flight recorder holds. Allocates; not for signal handlers.
std::string dump(const std::string& reason);

// Writes dumps to the folder from now on, and installs the handler of SIGUSR1; again for the same folder does nothing.
// Throws Caller where the folder cannot be made.
void dump_to(const std::string& folder);
// Writes one where dump_to() was called. At most one a second for each process: failures come in swarms. (The newest file
// of a process holds all that the older ones do, but for what the ring has lost since.) The file's name, or "".
std::string dump_now(const std::string& reason) noexcept;
// After that error of something that is named: a dump, if its blame is that of a rank that is late or gone.
void dump_after(const std::string& what, const Error& error) noexcept;

}  // namespace weft::trace
