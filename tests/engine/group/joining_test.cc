// SPDX-License-Identifier: Apache-2.0
// A rank that could not join a group.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

class FailedJoin : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, FailedJoin, testing::Values("weft", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

// No thread waits in the store for the ranks that have not come.
TEST_P(FailedJoin, LeavesTheStoreAlone) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // As rank 0 would say it.
  static_cast<c10d::Store&>(*store).set("0//weft/failed", "0 no memory");
  const Error error = harness::error_of([&] {
    init_process_group({.backend = GetParam(),
                        .rank = 1,
                        .world_size = 2,
                        .store = store,
                        .timeout = std::chrono::seconds(1000),
                        .device = at::kCPU});
  });
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_TRUE(harness::comes_true([&] { return store.use_count() == 1; }));
}

}  // namespace
}  // namespace weft
