// SPDX-License-Identifier: Apache-2.0
// Phrases of which weft-debug makes its findings (the sentences are in analysis.cc and
// stuck_messages.cc), and the names of calls that agents make for themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// "ranks 0, 2"; `what` is the word for one.
std::string list_ranks(const std::vector<int>& ranks, const std::string& what = "rank");
std::string duration_text(std::int64_t nanoseconds);
std::string title(const Group& group);
// "reduce (Sum, root 1) of float32 [4]"
std::string call_of(const Record& collective);
// "collective #7, all_reduce (Sum) of float32 [4] for GradScaler"; "the call of work::f on rank 1".
// `agent` is the word before an agent's number.
std::string describe(const Record& record, const std::string& agent = "rank");

// Whether the record is one of the calls by which agents agree that all are idle
// (engine/call/shutdown.cc).
bool is_of_shutdown(const Record& record);

// Whether agents call the function for themselves (shutdown, references, contexts) without data of
// the program: true for all of them but gradients.
bool is_control(const std::string& function);

}  // namespace weft::tools
