// How weft-debug puts what it has found; what the calls that agents make for themselves are called.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// "ranks 0, 2"; `what` they are of one.
std::string list_ranks(const std::vector<int>& ranks, const std::string& what = "rank");
std::string duration_text(std::int64_t nanoseconds);
std::string title(const Group& group);
// "reduce (Sum, root 1) of float32 [4]"
std::string call_of(const Record& collective);
// "collective #7, all_reduce (Sum) of float32 [4]"; "the call of work::f on rank 1". `agent`: what
// one is called.
std::string describe(const Record& record, const std::string& agent = "rank");

// Whether it is one of the calls by which agents agree that all are idle (engine/call/shutdown.cc).
bool is_of_shutdown(const Record& record);

// Whether the function of a call is one of agents for themselves (shutdown, references, contexts),
// which carries nothing of the program's: all of these but gradients.
bool is_control(const std::string& function);

}  // namespace weft::tools
