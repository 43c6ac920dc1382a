// SPDX-License-Identifier: Apache-2.0
// Ranks that run out of descriptors while they join: all ranks end at once and report the reason.
#include <array>
#include <csignal>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/tests/harness/few_descriptors.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::FewDescriptors;
using harness::Processes;

constexpr auto kLong =
    std::chrono::minutes(30);  // longer than the test may run, so nothing below waits for it

std::optional<Error> joined(const ProcessGroupOptions& options) {
  try {
    ProcessGroup group = init_process_group(options);
    at::Tensor tensor = at::ones(1);
    group.all_reduce(tensor).wait();
    group.barrier().wait();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

bool names_the_limit(const std::optional<Error>& error) {
  return error && error->blame() == Blame::Busy &&
         error->text().find("ulimit -n") != std::string::npos;
}

class WithoutDescriptors : public testing::TestWithParam<std::string> {};

TEST_P(WithoutDescriptors, JoiningFailsAtOnceAndSaysWhy) {
  ASSERT_FALSE(joined({.backend = GetParam(),
                       .rank = 0,
                       .world_size = 1,
                       .store = c10::make_intrusive<c10d::HashStore>()}))
      << "joining alone opens what a process opens once";
  bool has_joined = false;
  for (int left = 0; left < 200 && !has_joined; left += 3) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::array<std::optional<Error>, 2> errors;
    {
      const FewDescriptors few(left);
      const auto join = [&](int rank) {
        errors.at(static_cast<std::size_t>(rank)) = joined({.backend = GetParam(),
                                                            .rank = rank,
                                                            .world_size = 2,
                                                            .store = store,
                                                            .timeout = kLong});
      };
      std::thread other([&] { join(1); });
      join(0);
      other.join();
    }
    has_joined = !errors[0] && !errors[1];
    if (has_joined) break;
    EXPECT_TRUE(names_the_limit(errors[0]) || names_the_limit(errors[1]))
        << left << ": " << (errors[0] ? errors[0]->what() : "joined") << " / "
        << (errors[1] ? errors[1]->what() : "joined");
  }
  EXPECT_TRUE(has_joined);
}

// Gloo is left out: it ends a process whose limit another rank of that process reaches while it
// joins.
INSTANTIATE_TEST_SUITE_P(Group, WithoutDescriptors, testing::Values("shm", "tcp", "weft"),
                         [](const auto& backend) { return backend.param; });

class OneWithoutDescriptors : public testing::TestWithParam<std::string> {};

// Names the outcome of a rank that the test has given few descriptors.
std::string word_for(const std::optional<Error>& error) {
  if (!error) return "joined";
  EXPECT_TRUE(names_the_limit(error)) << error->what();
  return "named";
}

// With one descriptor the rank reaches the store; with each further one it gets further.
TEST_P(OneWithoutDescriptors, TellsTheOtherRanks) {
  std::string became;
  for (int left = 1; left < 60 && became != "joined"; ++left) {
    Processes ranks(2, [&](int rank) {
      std::optional<FewDescriptors> few;
      if (rank == 1) few.emplace(left);
      const auto error = joined({.backend = GetParam(), .timeout = kLong});
      few.reset();
      if (rank == 1) return Processes::say(word_for(error));
      if (error) {
        EXPECT_EQ(error->blame(), Blame::PeerLost);
        EXPECT_NE(error->text().find("ulimit -n"), std::string::npos) << error->what();
      }
      Processes::say(error ? "told" : "joined");
    });
    became = ranks.next_word(1);
    EXPECT_EQ(ranks.next_word(0), became == "joined" ? "joined" : "told") << left << " descriptors";
    ranks.expect_success();
  }
  EXPECT_EQ(became, "joined");
}

// Rank 1 may never hear of it, because the store, which would tell it, accepts no connection.
TEST_P(OneWithoutDescriptors, StoreHostFailsAtOnce) {
  std::string became;
  for (int left = 0; left < 60 && became != "joined"; ++left) {
    Processes ranks(2, [&](int rank) {
      std::optional<FewDescriptors> few;
      if (rank == 0) few.emplace(left);
      const auto error = joined({.backend = GetParam(), .timeout = kLong});
      few.reset();
      if (rank == 0) Processes::say(word_for(error));
    });
    became = ranks.next_word(0);
    if (became != "joined") ranks.signal(1, SIGKILL);
    ranks.expect_success(became == "joined" ? std::set<int>() : std::set<int>{1});
  }
  EXPECT_EQ(became, "joined");
}

INSTANTIATE_TEST_SUITE_P(Group, OneWithoutDescriptors,
                         testing::Values("gloo", "shm", "tcp", "weft"),
                         [](const auto& backend) { return backend.param; });

TEST(WithoutAnyDescriptor, JoiningNamesTheDescriptorLimit) {
  Processes ranks(1, [](int) {
    const FewDescriptors few(0);
    const auto error = joined({.backend = "tcp",
                               .init_method = "tcp://127.0.0.1:29578",
                               .rank = 1,
                               .world_size = 2,
                               .timeout = kLong});
    EXPECT_TRUE(names_the_limit(error)) << (error ? error->what() : "joined");
  });
  ranks.expect_success();
}

// In a network namespace of its own, the loopback interface exists but is down.
TEST(WithoutLoopback, RankZeroReportsThatLoopbackIsDown) {
  const auto enter = [] { return ::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0; };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(enter() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status != 0) GTEST_SKIP() << "this process may not create a network namespace";
  Processes processes(1, [&](int) {
    ASSERT_TRUE(enter());
    const auto error = joined({.backend = "tcp",
                               .init_method = "tcp://127.0.0.1:29577",
                               .rank = 0,
                               .world_size = 1,
                               .timeout = kLong});
    ASSERT_TRUE(error);
    EXPECT_NE(error->text().find("ip link set lo up"), std::string::npos) << error->what();
    EXPECT_EQ(error->text().find("port is taken"), std::string::npos) << error->what();
  });
  processes.expect_success();
}

}  // namespace
}  // namespace weft
