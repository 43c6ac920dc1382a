// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/instruments/job_clock.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::instruments {
namespace {

using trace::timeline::Clock;

// A machine whose clock starts `ahead` nanoseconds ahead of this machine's.
struct Machine {
  std::string host;
  std::int64_t ahead = 0;
};

struct Measured {
  Clock start;
  std::optional<Clock> end;
};

// Runs one rank per machine. `then` changes a rank's clock while the job runs.
std::vector<Measured> measure_all(const std::vector<Machine>& machines,
                                  const std::function<void(int rank, std::int64_t& ahead)>& then) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<Measured> measured(machines.size());
  std::vector<std::thread> ranks;
  for (std::size_t i = 0; i < machines.size(); ++i) {
    ranks.emplace_back([&, i] {
      std::int64_t ahead = machines[i].ahead;
      const LocalClock clock{machines[i].host, [&] { return trace::now() + ahead; },
                             [] { return trace::now(); }};
      const int rank = static_cast<int>(i);
      const JobClock job({rank, static_cast<int>(machines.size()), ""}, store, clock,
                         Deadline::in(std::chrono::seconds(60)));
      measured[i].start = job.at_start();
      then(rank, ahead);
      measured[i].end = job.at_end(std::chrono::seconds(20));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return measured;
}

constexpr auto kNothing = [](int, std::int64_t&) {};
constexpr std::int64_t kAhead = 5'000'000'000;

TEST(JobClock, OneMachineHasOneClock) {
  for (const Measured& measured : measure_all({{"a"}, {"a"}, {"a"}}, kNothing)) {
    EXPECT_EQ(measured.start.offset, 0);
    EXPECT_EQ(measured.start.error, 0);
    EXPECT_FALSE(measured.end);
  }
}

TEST(JobClock, OffsetsAreRightWithinTheirError) {
  const auto measured = measure_all({{"a"}, {"b", kAhead}, {"c", -3 * kAhead}}, kNothing);
  EXPECT_EQ(measured[0].start.offset, 0);
  EXPECT_GT(measured[1].start.error, 0);
  EXPECT_LE(std::abs(measured[1].start.offset + kAhead), measured[1].start.error);
  EXPECT_LE(std::abs(measured[2].start.offset - 3 * kAhead), measured[2].start.error);
}

TEST(JobClock, EndOffsetsIncludeTheDrift) {
  const auto measured = measure_all(
      {{"a"}, {"b", kAhead}, {"a"}, {"c", 0}},
      [](int rank, std::int64_t& ahead) { ahead += std::int64_t{1'000'000'000} * rank; });
  EXPECT_FALSE(measured[0].end) << "the job's time is rank 0's";
  EXPECT_FALSE(measured[2].end) << "it has the same clock as rank 0";
  ASSERT_TRUE(measured[1].end && measured[3].end);
  EXPECT_LE(std::abs(measured[1].end->offset + kAhead + 1'000'000'000), measured[1].end->error);
  EXPECT_LE(std::abs(measured[3].end->offset + 3'000'000'000), measured[3].end->error);
  EXPECT_GT(measured[1].end->at, measured[1].start.at + 1'000'000'000) << "by the rank's own clock";
}

TEST(JobClock, EndDoesNotWaitForGoneRanks) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const auto clock = [](const char* host) {
    return LocalClock{host, [] { return trace::now(); }, [] { return trace::now(); }};
  };
  const auto join = [&](int rank, const char* host) {
    return JobClock({rank, 3, ""}, store, clock(host), Deadline::in(std::chrono::seconds(60)));
  };
  std::vector<std::thread> gone;
  gone.emplace_back([&] { join(1, "b"); });
  std::optional<Clock> of_last = Clock();
  gone.emplace_back([&] { of_last = join(2, "c").at_end(std::chrono::milliseconds(1)); });
  const JobClock first = join(0, "a");
  for (std::thread& thread : gone) thread.join();
  EXPECT_FALSE(of_last) << "rank 0 had not reached the end";
  EXPECT_FALSE(first.at_end(std::chrono::milliseconds(1)));
}

TEST(JobClock, MissingRankIsATimeout) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  try {
    JobClock({1, 2, ""}, store, local_clock(), Deadline::in(std::chrono::milliseconds(10)));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout);
  }
}

TEST(MetricsAddress, TakesAPortAndAddsTheLocalRank) {
  EXPECT_EQ(metrics_address(":9400", 0), "0.0.0.0:9400");
  EXPECT_EQ(metrics_address(":9400", 3), "0.0.0.0:9403");
  EXPECT_EQ(metrics_address("127.0.0.1:80", 0), "127.0.0.1:80");
  EXPECT_EQ(metrics_address("[::1]:80", 0), "[::1]:80");
  for (const char* wrong : {"", "9400", ":", ":x", ":0", ":65536", ":9400+", ":65535", ":-1"}) {
    EXPECT_THROW(metrics_address(wrong, 1), Error) << wrong;
  }
}

}  // namespace
}  // namespace weft::instruments
