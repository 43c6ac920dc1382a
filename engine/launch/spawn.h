// SPDX-License-Identifier: Apache-2.0
// Runs ranks as forked copies of this process, for programs that bring their own ranks: tests,
// examples, notebooks of one file.
#pragma once

#include <functional>

#include <weft/base/export.h>

namespace weft {

// Forks `ranks` processes that each call function(rank, world_size) and end; sets RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port) for them, so that
// init_process_group() joins them. Blocks until all have ended. When a rank fails, ends the others
// and throws its exception: an Error keeps its blame, text, ranks(), native_code() and place();
// other exceptions become Blame::Remote. A rank that a signal killed is PeerLost; one that called
// exit(n) itself is Remote.
//
// The ranks are children of a further copy of this process, which watches them. If this process is
// killed, also by kill -9, or a rank fails, the ranks end, and so do the processes that they have
// started, unless these have made sessions of their own (setsid). If all ranks end well, processes
// that they have started keep running.
//
// The function runs on a thread of its own. Fork copies only the calling thread: call spawn before
// anything has used CUDA or started threads that the ranks need (libtorch's threads for computing
// are not needed).
WEFT_API void spawn(int ranks, const std::function<void(int rank, int world_size)>& function);

}  // namespace weft
