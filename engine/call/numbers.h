// SPDX-License-Identifier: Apache-2.0
// Ids by which all workers know the contexts, passes and references of one worker.
#pragma once

#include <cstdint>

namespace weft::call {

inline constexpr int kHighestRank = 0xffff;  // the highest rank of a worker that an id has room for
inline constexpr std::uint64_t kMostOfOne = (std::uint64_t{1} << 48) - 1;

// The rank is in the top 16 bits. Below it is the worker's own count, which begins again after
// 2^48, so that no count changes the rank.
constexpr std::uint64_t number_of(int rank, std::uint64_t count) {
  return static_cast<std::uint64_t>(static_cast<std::uint16_t>(rank)) << 48 | (count & kMostOfOne);
}

constexpr int rank_in(std::uint64_t number) { return static_cast<int>(number >> 48); }

// One of the workers that had a rank one after the other. Keeps as many bits of the generation as
// such ids hold (AgentCore::first_id).
struct WorkerGeneration {
  int rank = -1;
  std::uint16_t generation = 0;
  bool is_before(std::uint16_t other) const {
    return static_cast<std::int16_t>(other - generation) > 0;
  }
};
// The worker that assigned the id.
constexpr WorkerGeneration made_by(std::uint64_t number) {
  return {rank_in(number), static_cast<std::uint16_t>(number >> 32)};
}

}  // namespace weft::call
