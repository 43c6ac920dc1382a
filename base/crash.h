// SPDX-License-Identifier: Apache-2.0
// Crash reports: a process that ends by SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT writes to stderr
// which thread ended it, why, and which functions were running. Reports are off by default;
// WEFT_CRASH_TRACE=on, which weft-run sets for its ranks, or report_crashes(), which weft::spawn
// calls in its processes, turns them on.
//
// A signal that the program handles or ignores is left alone; a program that installs a handler
// later replaces this one. The process ends as it would have without a report: by the same signal,
// with a core dump if the system writes one. A sanitizer's build reports by itself, so it has no
// reports from here.
//
// The handler itself does not unwind, allocate or lock. It copies the process; the copy, which has
// the same memory and a time limit, reads the stack and the symbols. Damaged memory then ends the
// copy and not the report (docs/looking-inside.md).
#pragma once

namespace weft::crash {

// Turns on reports in this process, unless WEFT_CRASH_TRACE is off. Reads RANK for the report's
// first line. Any thread may call it; a second call only prepares the calling thread.
void report_crashes() noexcept;

// Gives this thread, until it ends, a stack on which the handler runs when the thread's own stack
// has overflowed. Does nothing if the process does not report or the thread has such a stack.
// Weft's threads call it, and threads that join.
void prepare_thread() noexcept;

// Sets the function that writes more after the stack; the process has one. It runs in a copy of the
// crashed process that has one thread: other threads may have left locks held, and the heap may be
// damaged. It returns false if it could not write.
using AtCrash = bool (*)(const char* reason);
void at_crash(AtCrash function) noexcept;

}  // namespace weft::crash
