// How weft-debug puts what it has found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

std::string list_ranks(const std::vector<int>& ranks);  // "ranks 0, 2"
std::string duration_text(std::int64_t nanoseconds);
std::string title(const Group& group);
// "collective #7, all_reduce of float32 [4]"
std::string describe(const Record& record);

// Whether it is one of the calls by which agents agree that all are idle (engine/rpc/shutdown.cc).
bool is_of_shutdown(const Record& record);

}  // namespace weft::tools
