// SPDX-License-Identifier: Apache-2.0
// The process between a job's processes and the process that started the job. After kill -9 of
// weft-run, of a program in weft::spawn, or of the process below them that watches the ranks, it
// ends the ranks and all processes that they have started, also through scripts, wrappers
// and forks: one of the two is always an ancestor that adopts orphans (a subreaper). If both are
// killed at once, the ranks' children survive.
#pragma once

#include <functional>

namespace weft::launch {

// Runs `job` in a child process, where this function returns the exit code of `job`; this process
// waits and exits with the same code. Forwards signals that end a job, and SIGUSR1, to the child,
// unless a terminal has sent them to both. The child gets SIGTERM when this process dies. If the
// child is killed, this process ends the processes that the child has left, and exits with 128 +
// the signal's number. Changes the signal mask, so main() calls it before there are threads.
// Returns 1, and prints the reason to stderr, if no process can be started.
int run_guarded(const std::function<int()>& job);

// Changes the name and the arguments that ps and pkill see of this process: pkill -9 weft-run, also
// with -f, then kills the process that a user started and not the one that ends the job afterwards.
// Overwrites the texts of `argv`.
void rename_process(int argc, char** argv, const char* name);

}  // namespace weft::launch
