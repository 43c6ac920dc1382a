// What a weft-run was told by signals since it started: flags that main()'s handlers set and its
// one thread reads.
#pragma once

#include <csignal>

namespace weft::launch {

inline volatile std::sig_atomic_t received_signal = 0;  // that ends the job
inline volatile std::sig_atomic_t signal_of_terminal =
    0;  // it has sent the same to the ranks, and once is enough
inline volatile std::sig_atomic_t is_hurried =
    0;  // a Ctrl-C came after it: what still runs is killed
inline volatile std::sig_atomic_t asked_for_dumps = 0;

// Installs the handlers.
void listen_for_signals();

}  // namespace weft::launch
