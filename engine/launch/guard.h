// The process that stands between a job's processes and whoever started them. What kill -9 does to
// weft-run, to a program in weft::spawn, or to the process below them that watches the ranks, then
// ends the ranks and all that they have started, below whatever scripts, wrappers and forks: one of
// the two is always an ancestor that adopts orphans (a subreaper). Who kills both at once leaves
// the ranks' children.
#pragma once

#include <functional>

namespace weft::launch {

// Runs `job` in a child of this process and returns its exit code, in this process only. Signals
// that end a job, and SIGUSR1, go on to the child, unless a terminal has sent them to both. The
// child gets SIGTERM when this process dies. If the child is killed, this process ends what it has
// left, and returns 128 + the signal's number. Changes the signal mask, so main() calls it, before
// there are threads. Returns 1, and says why on stderr, where no process can be started.
int run_guarded(const std::function<int()>& job);

// What ps and pkill see of this process from now on, in place of the program's name and arguments:
// pkill -9 weft-run, with -f as well, kills the process that a user started and not the one that
// then ends the job. Overwrites `argv`'s texts.
void rename_process(int argc, char** argv, const char* name);

}  // namespace weft::launch
