// SPDX-License-Identifier: Apache-2.0
// Timeline parts that rank 0 cannot read, because it shares no file system with the rank that
// writes them: at the end, that rank sends them over the job's store, in pieces, a few at a time.
// Each rank finds out by itself whether it sees rank 0's part.
//
// Limits: a part has at most kMostPart bytes; no rank waits for another for more than kPatience, or
// three times that while rank 0 is busy with others.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

constexpr std::size_t kPiece = std::size_t{1} << 20;  // bytes
// Pieces that may lie in the store, not yet taken.
constexpr int kPiecesAhead = 8;
// How long a rank waits without news of another.
constexpr auto kPatience = std::chrono::seconds(20);

// Called by rank 0 once it writes its part; `path` is that part's.
void show_part(transport::Bootstrap& store, const std::string& path);
// Called by the other ranks: returns whether this rank cannot see rank 0's part, and tells rank 0
// if so. Throws Timeout.
bool is_away(transport::Bootstrap& store, int rank, const std::string& file, Deadline deadline);

// Called by a rank that is away, once its part has ended. Throws Timeout if rank 0 takes no more of
// it.
void send_part(transport::Bootstrap& store, int rank, const std::string& path);
// Called by rank 0 after its own operations: takes the parts of the ranks that are away into the
// folder of the file's parts, under names that start with `job`. Logs a warning for each part that
// does not arrive. Returns how many arrived.
int take_parts(transport::Bootstrap& store, int ranks, const std::string& file,
               const std::string& job);

}  // namespace weft::instruments
