// Numbers that all workers know one worker's things by: contexts, passes, references.
#pragma once

#include <cstdint>

namespace weft::rpc {

inline constexpr std::uint64_t kMostOfOne = (std::uint64_t{1} << 48) - 1;

// The rank in the top 16 bits, below it a count of its own, which begins again after 2^48: no count makes it another
// rank's.
constexpr std::uint64_t number_of(int rank, std::uint64_t count) {
  return static_cast<std::uint64_t>(static_cast<std::uint16_t>(rank)) << 48 | (count & kMostOfOne);
}

// Of whom it is a number: its rank, and 16 bits of its life (AgentCore::first_id).
constexpr int rank_in(std::uint64_t number) { return static_cast<int>(number >> 48); }
constexpr std::uint16_t life_in(std::uint64_t number) { return static_cast<std::uint16_t>(number >> 32); }

}  // namespace weft::rpc
