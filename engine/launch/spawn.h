// Ranks as forked copies of this process, for programs that bring their own: tests, examples,
// notebooks of one file.
#pragma once

#include <functional>

#include <weft/base/export.h>

namespace weft {

// Forks `ranks` processes that each call function(rank, world_size) and end; sets RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port) for them, so that
// init_process_group() joins them. Blocks until all have ended. The first that fails ends the
// others, and its exception is thrown here: an Error keeps its blame, text, ranks(), native_code()
// and place(), others become Blame::Remote; a rank that a signal killed is PeerLost, one that
// called exit(n) itself Remote.
//
// The ranks are children of a further copy of this process, which watches them. If this process is
// killed, kill -9 included, or a rank fails, the ranks end, and so do the processes that they have
// started, unless these have made sessions of their own (setsid). What ranks leave behind when all
// end well goes on.
//
// The function runs on a thread of its own. Fork copies only the calling one: call it before
// anything has used CUDA, or started threads that the ranks would need (libtorch's own for
// computing are no such).
WEFT_API void spawn(int ranks, const std::function<void(int rank, int world_size)>& function);

}  // namespace weft
