// SPDX-License-Identifier: Apache-2.0
// An error on one rank is thrown on all ranks.
#include <new>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>
#include <weft/tests/harness/ranks.h>

namespace weft::group {
namespace {

using harness::As;
using testing::HasSubstr;
using testing::Not;

void on_ranks(const harness::Body& body) {
  harness::run_ranks(As::Threads, 3, body, {.backend = "gloo"});
}

TEST(Agree, ReturnsIfNoRankFailed) {
  on_ranks([](ProcessGroup& group) {
    agree(group, std::nullopt);
    EXPECT_EQ(all_gather_object(group.rank(), group), (std::vector<int>{0, 1, 2}));
  });
}

TEST(Agree, AllThrowTheFirstRanksError) {
  on_ranks([](ProcessGroup& group) {
    const int rank = group.rank();
    const auto failure = error_of([&] {
      if (rank == 1) throw Error(Blame::Busy, "the disk is full");
      if (rank == 2) throw Error(Blame::Caller, "no such part");
    });
    const auto thrown = error_of([&] { agree(group, failure); });
    ASSERT_TRUE(thrown.has_value());
    EXPECT_EQ(thrown->blame(), Blame::Busy);
    EXPECT_EQ(thrown->text(), "the disk is full");
    agree(group, std::nullopt);  // the group goes on
  });
}

// Repeated, because a rank that throws leaves the group and must not leave before its error
// arrives.
TEST(Agree, ErrorArrivesBeforeTheRankLeaves) {
  harness::Processes processes(3, [](int rank) {
    for (int life = 0; life < 10; ++life) {
      const auto thrown = error_of([&] {
        auto group = init_process_group({.backend = "gloo"});
        agree(group,
              rank == 0 ? std::optional(Error(Blame::Busy, "the disk is full")) : std::nullopt);
      });
      ASSERT_TRUE(thrown.has_value());
      EXPECT_EQ(thrown->text(), "the disk is full");
    }
  });
  processes.expect_success();
}

TEST(Agree, LongTextsAreCut) {
  on_ranks([](ProcessGroup& group) {
    std::optional<Error> failure;
    if (group.rank() == 2) failure = Error(Blame::Remote, std::string(1 << 20, 'x'));
    const auto thrown = error_of([&] { agree(group, failure); });
    ASSERT_TRUE(thrown.has_value());
    EXPECT_EQ(thrown->text(), std::string((16 << 10) - 2, 'x'));
  });
}

TEST(Agree, OversizedTextsAreRefused) {
  on_ranks([](ProcessGroup& group) {
    const auto bytes = torch::zeros({group.rank() == 0 ? 20'000 : 0}, torch::kByte);
    const auto thrown = error_of([&] {
      if (group.rank() != 0) return agree(group, std::nullopt);
      detail::all_gather_ragged(
          bytes, group, {"the text of an error", 16 << 10, "that rank runs another program"});
    });
    ASSERT_TRUE(thrown.has_value());
    EXPECT_EQ(
        thrown->text(),
        "the text of an error of 20000 bytes; the limit is 16384; that rank runs another program");
  });
}

TEST(Agree, AnyExceptionBecomesAnError) {
  EXPECT_FALSE(error_of([] {}).has_value());
  EXPECT_EQ(error_of([] { throw Error(Blame::Timeout, "late\nby far"); })->text(), "late\nby far");
  const auto of_libtorch = error_of([] { torch::zeros({2}).view({3}); });
  EXPECT_THAT(of_libtorch->text(), HasSubstr("shape '[3]' is invalid"));
  EXPECT_THAT(of_libtorch->text(), Not(HasSubstr("\n")));
  EXPECT_THAT(error_of([] { throw std::bad_alloc(); })->text(), HasSubstr("out of memory"));
  EXPECT_THAT(error_of([] { throw 7; })->text(), HasSubstr("not a std::exception"));
}

}  // namespace
}  // namespace weft::group
