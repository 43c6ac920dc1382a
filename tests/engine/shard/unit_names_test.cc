// SPDX-License-Identifier: Apache-2.0
// Errors and the flight recorder name the unit whose operation fails, over every backend.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/mesh.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::StartsWith;

constexpr const char* kUnit = "FullyShardedDataParallel's unit '0'";

// The unit's operations that are in one of these states, on all ranks.
std::set<std::string> recorded(const std::set<trace::State>& states) {
  std::set<std::string> names;
  for (const trace::Record& record : trace::flight_recorder().read()) {
    if (record.called_by == std::string(kUnit) && states.contains(record.state))
      names.insert(record.name);
  }
  return names;
}

class UnitNames : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(, UnitNames, ::testing::Values("gloo", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(UnitNames, AreInErrorsAndInTheFlightRecorder) {
  run_ranks(As::Threads, 2,
            [](ProcessGroup& group) {
              const Mesh mesh(group, {{"replicate", 1}, {"shard", 2}});
              auto model = blocks(2);
              FullyShardedDataParallel sharded(model, mesh);
              if (group.rank() == 1) {
                EXPECT_TRUE(harness::comes_true(
                    [] { return recorded({trace::State::Open}).contains("all_gather"); }));
                return mesh["shard"].abort("over");
              }
              const Error error = error_of([&] { sharded(torch::ones({4, 8})); });
              EXPECT_EQ(error.blame(), Blame::Cancelled);
              EXPECT_THAT(error.text(), StartsWith(std::string(kUnit) + ": all_gather #"));
              EXPECT_THAT(error.text(), HasSubstr("shard[0] of replicate[0]"));
              EXPECT_THAT(group.dump(), HasSubstr(std::string("\"called_by\":\"") + kUnit + "\""));
            },
            {.backend = GetParam()});
}

TEST_P(UnitNames, AreInTimeouts) {
  std::atomic<bool> is_late{false};
  run_ranks(As::Threads, 2,
            [&](ProcessGroup& group) {
              auto model = blocks(2);
              FullyShardedDataParallel sharded(model, group);
              if (group.rank() == 1) {
                EXPECT_TRUE(harness::comes_true([&] { return is_late.load(); }));
                return;
              }
              const Error error = error_of([&] { sharded(torch::ones({4, 8})); });
              is_late = true;
              EXPECT_EQ(error.blame(), Blame::Timeout);
              EXPECT_THAT(error.text(), StartsWith(std::string(kUnit) + ": all_gather #"));
            },
            {.backend = GetParam(), .timeout = std::chrono::milliseconds(600)});
}

TEST_P(UnitNames, AreWithEveryOperationOfAStep) {
  run_ranks(As::Threads, 4,
            [](ProcessGroup& group) {
              const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
              auto model = blocks(2);
              FullyShardedDataParallel sharded(model, mesh);
              sharded(torch::ones({4, 8})).sum().backward();
            },
            {.backend = GetParam()});
  EXPECT_THAT(recorded({trace::State::Done}),
              IsSupersetOf({"all_gather", "reduce_scatter", "all_reduce"}));
}

}  // namespace
}  // namespace weft::testing
