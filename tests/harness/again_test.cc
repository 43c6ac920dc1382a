// SPDX-License-Identifier: Apache-2.0
// Tests of ranks that run this program again: their results are the results of this process's
// tests.
#include <cstdlib>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/again.h>
#include <weft/tests/harness/file_bootstrap.h>

namespace weft::harness {
namespace {

constexpr auto kSoon = std::chrono::seconds(20);

Again& shared() {
  static Again again(2, "OfTheSameRanks", {.variables = [](int rank) {
                       return std::vector{"NUMBER=" + std::to_string(rank)};
                     }});
  return again;
}

// Expects that each rank has its own variables, and that each sees the other.
void expect_both(int rank, const std::string& folder) {
  EXPECT_EQ(std::getenv("NUMBER"), std::to_string(rank));
  FileBootstrap store(folder);
  store.set("from" + std::to_string(rank), {});
  EXPECT_TRUE(store.get("from" + std::to_string(1 - rank), Deadline::in(kSoon)).empty());
}

int seen = 0;  // counted in a rank

TEST(Again, TheFirstOfTheSameRanks) {
  shared().run([](int rank, const std::string& folder) {
    ++seen;
    expect_both(rank, folder);
  });
  EXPECT_EQ(seen, Again::is_rank() ? 1 : 0);
}

TEST(Again, OthersAreRunBetween) {
  run_again(3, [](int rank, const std::string& folder) {
    EXPECT_EQ(seen, 0);
    FileBootstrap(folder).add("ranks", rank + 1);
    if (rank == 0) {
      while (FileBootstrap(folder).add("ranks", 0) != 6) std::this_thread::yield();
    }
  });
}

TEST(Again, TheSecondOfTheSameRanks) {
  shared().run([](int rank, const std::string& folder) {
    EXPECT_EQ(++seen, 2) << "(or the first was not run)";
    expect_both(rank, folder);
  });
}

// Expects that a test in which rank 1 runs `of_rank_1` fails with `text`.
void expect_failure(const std::function<void()>& of_rank_1, const char* text,
                    std::chrono::seconds limit = kSoon) {
  const auto run = [&] {
    Again(2, testing::UnitTest::GetInstance()->current_test_info()->name(), {.limit = limit})
        .run([&](int rank, const std::string&) {
          if (rank == 1) of_rank_1();
        });
  };
  if (Again::is_rank()) return run();
  testing::TestPartResultArray failures;
  {
    const testing::ScopedFakeTestPartResultReporter taken(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    run();
  }
  ASSERT_EQ(failures.size(), 1);
  EXPECT_NE(std::string(failures.GetTestPartResult(0).message()).find(text), std::string::npos)
      << failures.GetTestPartResult(0).message();
}

TEST(Again, AnExpectationOfARankFails) {
  expect_failure([] { ADD_FAILURE() << "what it expects"; }, "what it expects");
}

TEST(Again, AnExceptionOfARankFails) {
  expect_failure([] { throw std::runtime_error("what it throws"); }, "what it throws");
}

TEST(Again, ARankThatEndsFails) {
  expect_failure([] { std::_Exit(3); }, "rank 1 ended with exit code 3");
}

TEST(Again, ARankThatHangsFails) {
  expect_failure([] { std::this_thread::sleep_for(kSoon); }, "the ranks did not end within 1 s",
                 std::chrono::seconds(1));
}

}  // namespace
}  // namespace weft::harness
