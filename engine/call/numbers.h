// Numbers that all workers know one worker's things by: contexts, passes, references.
#pragma once

#include <cstdint>

namespace weft::rpc {

inline constexpr int kHighestRank = 0xffff;  // of a worker: what a number has room for
inline constexpr std::uint64_t kMostOfOne = (std::uint64_t{1} << 48) - 1;

// The rank in the top 16 bits, below it a count of its own, which begins again after 2^48: no count
// makes it another rank's.
constexpr std::uint64_t number_of(int rank, std::uint64_t count) {
  return static_cast<std::uint64_t>(static_cast<std::uint16_t>(rank)) << 48 | (count & kMostOfOne);
}

constexpr int rank_in(std::uint64_t number) { return static_cast<int>(number >> 48); }

// One of the workers that have a rank one after the other, by as much of its life as such numbers
// hold (AgentCore::first_id).
struct WorkerGeneration {
  int rank = -1;
  std::uint16_t generation = 0;
  bool is_before(std::uint16_t other) const {
    return static_cast<std::int16_t>(other - generation) > 0;
  }
};
// Whose number it is.
constexpr WorkerGeneration made_by(std::uint64_t number) {
  return {rank_in(number), static_cast<std::uint16_t>(number >> 32)};
}

}  // namespace weft::rpc
