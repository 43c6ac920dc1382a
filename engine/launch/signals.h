// SPDX-License-Identifier: Apache-2.0
// The signals that weft-run has received: flags that signal handlers set and the main thread reads.
#pragma once

#include <csignal>

namespace weft::launch {

inline volatile std::sig_atomic_t received_signal = 0;  // the first signal that ends the job
// The terminal has sent received_signal to the ranks too, so weft-run must not send it again.
inline volatile std::sig_atomic_t signal_of_terminal = 0;
// A Ctrl-C followed received_signal: weft-run kills the processes that still run.
inline volatile std::sig_atomic_t is_hurried = 0;
inline volatile std::sig_atomic_t asked_for_dumps = 0;

void listen_for_signals();

}  // namespace weft::launch
