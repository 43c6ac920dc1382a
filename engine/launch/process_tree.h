// The processes below this one, as /proc tells: children, theirs, and orphans that this process has
// adopted (a subreaper, prctl(2)). weft-run signals them all, because a rank may be a script that
// waits for the program which trains. Process groups would serve as well, but for the terminal:
// Ctrl-C, Ctrl-Z and reading belong to the group in its foreground. Any thread.
#pragma once

#include <set>
#include <vector>

#include <sys/types.h>

namespace weft::launch {

// Those that run, parents first. A child of this process that is not among `known` is an adopted
// orphan. One that has made a session of its own means to outlive the job: without `sessions`
// neither it nor what is below it is among them.
std::vector<pid_t> descendants(const std::set<pid_t>& known, bool sessions);

// Whether the process has a handler for the signal.
bool catches(pid_t process, int signal);

}  // namespace weft::launch
