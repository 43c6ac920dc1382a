// SPDX-License-Identifier: Apache-2.0
// For tests that kill one of several processes at a random instant.
#pragma once

#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <tuple>

#include <gtest/gtest.h>

#include <weft/tests/harness/ranks.h>

namespace weft::harness {

// The transport, and the seed of all random numbers.
using KilledCase = std::tuple<std::string, int>;
inline std::string killed_name(const ::testing::TestParamInfo<KilledCase>& one) {
  return std::get<0>(one.param) + "Seed" + std::to_string(std::get<1>(one.param));
}

// Kills the victim at a random time within `limit` after all ranks have said "ready"; the others
// must succeed.
inline void kill_anywhen(Processes& processes, int ranks, int victim, int seed,
                         std::chrono::microseconds limit) {
  for (int rank = 0; rank < ranks; ++rank) processes.wait_for(rank, "ready");
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  std::this_thread::sleep_for(limit * static_cast<int>(random() % 1000) / 1000);
  processes.signal(victim, SIGKILL);
  processes.expect_success({victim});
}

}  // namespace weft::harness
