// Reports of crashes: a process that ends by SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT writes to
// stderr which thread ended it, why, and the functions that were running. Only where asked for: by
// WEFT_CRASH_TRACE=on, which weft-run sets for its ranks, or by report_crashes(), which weft::spawn
// calls for its own.
//
// A signal that the program handles or ignores is left alone, and a program that handles it later
// replaces this. The process ends as it would have: by the same signal, with a core dump where the
// system writes one. A sanitizer's build reports by itself.
//
// The handler unwinds, allocates and locks nothing: it forks, and the child, which has the same
// memory and a time limit, reads the stack and the symbols. What is damaged ends the child, and not
// the report (docs/looking-inside.md).
#pragma once

namespace weft::crash {

// Begins reports in this process, unless WEFT_CRASH_TRACE is off. Reads RANK for their first line.
// Any thread; again only prepares the thread.
void report_crashes() noexcept;

// Gives this thread a stack on which the handler runs when the thread's own has overflowed, until
// it ends; nothing in a process that does not report, and in a thread that has such a stack
// already. Threads of Weft call it, and those that join.
void prepare_thread() noexcept;

// Sets a function that writes more after the stack, in a child of the crashed process, which has
// one thread: other threads may have held locks for ever, and the heap may be damaged. False: it
// could not. One for the process.
using AtCrash = bool (*)(const char* reason);
void at_crash(AtCrash function) noexcept;

}  // namespace weft::crash
