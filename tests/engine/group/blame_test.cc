// SPDX-License-Identifier: Apache-2.0
// The ranks that errors name after a rank has left, given up or aborted: never one that lives and
// has only left because of another.
#include <latch>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/group/core.h>
#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using namespace std::chrono_literals;
using harness::error_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class BlameOver : public testing::TestWithParam<const char*> {
 protected:
  // Runs the body on threads, each with its rank's only handle of one group.
  void on_ranks(int ranks, const std::function<void(ProcessGroup group)>& body) {
    harness::run_threads(ranks, [&](int rank) {
      ProcessGroup group = init_process_group({.backend = GetParam(),
                                               .rank = rank,
                                               .world_size = ranks,
                                               .store = store_,
                                               .timeout = 50s,
                                               .device = at::kCPU});
      harness::meet(group);
      body(std::move(group));
    });
  }
  // Blocks until the group is broken, and returns the reason.
  static Error reason_of(const ProcessGroup& group) {
    EXPECT_TRUE(harness::comes_true([&] { return group.error().has_value(); }));
    return group.error().value_or(Error(Blame::Cancelled, "none"));
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

INSTANTIATE_TEST_SUITE_P(Over, BlameOver, testing::Values("gloo", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(BlameOver, ALeaverIsNamedByRanksThatHearOfItThroughAnother) {
  on_ranks(3, [](ProcessGroup group) {
    if (group.rank() == 2) return;
    if (group.rank() == 0) {
      const Error error = error_of([&] { group.all_reduce(torch::ones({1})).wait(); });
      EXPECT_THAT(error.ranks(), ElementsAre(2)) << error.text();
      return;
    }
    // Rank 0 has left because rank 2 had.
    EXPECT_TRUE(harness::comes_true([&] { return group.living_ranks() == std::vector<int>{1}; }));
    const Error error = error_of([&] { group.all_reduce(torch::ones({1})).wait(); });
    EXPECT_THAT(error.ranks(), ElementsAre(2)) << error.text();
    EXPECT_THAT(error.text(), Not(HasSubstr("is lost")));
  });
}

TEST_P(BlameOver, ATimeoutIsOneForRanksThatHearOfIt) {
  on_ranks(3, [](ProcessGroup group) {
    const auto late = [&] {
      return error_of([&] { group.with_timeout(100ms).all_reduce(torch::ones({1})).wait(); });
    };
    if (group.rank() == 0) {
      const Error error = late();
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.text();
      EXPECT_THAT(error.ranks(), ElementsAre(1, 2)) << error.text();
      return;
    }
    const auto is_told = AllOf(HasSubstr("rank 0 has given up"), Not(HasSubstr("is lost")));
    const Error reason = reason_of(group);
    EXPECT_EQ(reason.blame(), Blame::Timeout) << reason.text();
    EXPECT_THAT(reason.ranks(), ElementsAre(1, 2)) << reason.text();
    EXPECT_THAT(reason.text(), is_told);
    EXPECT_EQ(late().blame(), Blame::Timeout);
  });
}

TEST_P(BlameOver, AnAbortNamesItsRank) {
  on_ranks(3, [](ProcessGroup group) {
    if (group.rank() == 1) group.abort("enough");
    const Error reason = reason_of(group);
    EXPECT_EQ(reason.blame(), Blame::Cancelled);
    EXPECT_THAT(reason.ranks(), ElementsAre(1));
    EXPECT_THAT(reason.text(), HasSubstr("rank 1 aborted the group: enough"));
    const Error error = error_of([&] { group.all_reduce(torch::ones({1})).wait(); });
    EXPECT_EQ(error.blame(), Blame::Cancelled);
    EXPECT_THAT(error.ranks(), ElementsAre(1));
  });
}

TEST_P(BlameOver, AReceiveFromAnyDoesNotNameALeaver) {
  std::latch received(1);
  on_ranks(3, [&](ProcessGroup group) {
    if (group.rank() == 2) return;
    if (group.rank() == 1) return received.wait();
    EXPECT_TRUE(harness::comes_true([&] {
      return group.living_ranks() == std::vector<int>{0, 1};
    }));
    const Error error = error_of([&] { group.with_timeout(100ms).recv(torch::ones({1})).wait(); });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.ranks(), ElementsAre(1)) << error.text();
    EXPECT_THAT(error.text(), Not(HasSubstr("rank 2")));
    received.count_down();
  });
}

// Its process lives, so the other rank may be right where it is.
TEST(Blame, ARankThatCannotBeReachedIsNotCalledLost) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    group::Core& core = group::Core::of(group);
    const Error error = core.failure.explain(Error(Blame::PeerLost, "the connection has ended"));
    EXPECT_THAT(error.ranks(), ElementsAre(1 - group.rank()));
    EXPECT_THAT(error.text(), AllOf(HasSubstr("cannot be reached"), Not(HasSubstr("is lost"))));
    EXPECT_TRUE(group.error().has_value()) << "the rank tells the others when it leaves";
  });
}

}  // namespace
}  // namespace weft
