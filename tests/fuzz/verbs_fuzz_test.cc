// SPDX-License-Identifier: Apache-2.0
// Drives the target without libFuzzer: random scripts, the same ones in every run.
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <weft/tests/harness/all_settings.h>
#include <weft/transport/verbs/wire.h>

namespace weft::transport::verbs {

std::size_t fuzz_lane(Bytes input);

namespace {

TEST(VerbsFuzz, RunsAWholeScript) {
  std::vector<std::byte> script;
  for (int i = 0; i < 20; ++i) {
    for (const int step : {3, 100, 8, 7, 0, 0, 0, 4, 8, 5, 1})
      script.push_back(static_cast<std::byte>(step));
  }
  EXPECT_GT(fuzz_lane(script), 100u);
}

TEST(VerbsFuzz, RandomScriptsBreakNothing) {
  std::mt19937 random(20240601);
  std::size_t steps = 0;
  const int rounds = harness::runs_all_settings() ? 2000 : 500;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::uint8_t> script(random() % 200 + 1);
    for (std::uint8_t& byte : script)
      byte = static_cast<std::uint8_t>(random() % 4 == 0 ? random() : random() % 11);
    steps += fuzz_lane({reinterpret_cast<const std::byte*>(script.data()), script.size()});
  }
  EXPECT_GT(steps,
            5u * static_cast<unsigned>(rounds));  // otherwise the connections end too early
}

}  // namespace
}  // namespace weft::transport::verbs
