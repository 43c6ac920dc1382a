// SPDX-License-Identifier: Apache-2.0
// The processes below this one, read from /proc: its children, theirs, and orphans that this
// process has adopted (a subreaper, prctl(2)). weft-run signals them all, because a rank may be a
// script that waits for the program which trains. Process groups would serve as well, except at a
// terminal, whose Ctrl-C, Ctrl-Z and input belong to the foreground group. Callable from any
// thread.
#pragma once

#include <set>
#include <vector>

#include <sys/types.h>

namespace weft::launch {

// Returns the running descendants, parents first. A child of this process that is not in `known` is
// an adopted orphan. An orphan in a session of its own is meant to outlive the job: unless
// `sessions` is true, it and its descendants are left out.
std::vector<pid_t> descendants(const std::set<pid_t>& known, bool sessions);

// Whether the process has a handler for the signal.
bool catches(pid_t process, int signal);

}  // namespace weft::launch
