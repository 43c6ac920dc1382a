// Parts of a timeline that rank 0 cannot read, for want of a file system that it shares with the
// rank that writes them: at the end they travel to it over the job's store, in pieces, a few at a
// time. Each rank finds out by itself whether it sees the part of rank 0.
//
// Bounded: a part has at most kMostPart bytes; no rank waits for another for more than kPatience,
// or three times that while rank 0 is busy with others.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

constexpr std::size_t kPiece = std::size_t{1} << 20;  // bytes
constexpr int kPiecesAhead = 8;  // that lie in the store and have not been taken
constexpr auto kPatience = std::chrono::seconds(20);  // without news

// By rank 0, once it writes its part, whose path that is.
void show_part(transport::Bootstrap& store, const std::string& path);
// By the others: whether rank 0's part cannot be seen from here. Rank 0 is told if so. Throws
// Timeout.
bool is_away(transport::Bootstrap& store, int rank, const std::string& file, Deadline deadline);

// By a rank that is away, with its part when that has ended. Throws Timeout when rank 0 takes no
// more of it.
void send_part(transport::Bootstrap& store, int rank, const std::string& path);
// By rank 0, after its own operations: takes the parts of the ranks that are away into the folder
// of the file's parts, under names that start with `job`. Each that does not come is a warning.
// Returns how many came.
int take_parts(transport::Bootstrap& store, int ranks, const std::string& file,
               const std::string& job);

}  // namespace weft::instruments
