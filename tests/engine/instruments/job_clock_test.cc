#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/instruments/job_clock.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::instruments {
namespace {

using trace::timeline::Clock;

// A machine whose clock is so far ahead of this one's.
LocalClock machine(const std::string& host, std::int64_t ahead) {
  return {host, [ahead] { return trace::now() + ahead; }, [] { return trace::now(); }};
}

std::vector<Clock> measure_all(const std::vector<LocalClock>& clocks) {
  harness::MemoryBootstrap store;
  std::vector<Clock> measured(clocks.size());
  std::vector<std::thread> ranks;
  for (std::size_t i = 0; i < clocks.size(); ++i) {
    ranks.emplace_back([&, i] {
      const Participant participant{static_cast<int>(i), static_cast<int>(clocks.size())};
      measured[i] = measure(participant, store, clocks[i], Deadline::in(std::chrono::seconds(60)));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return measured;
}

TEST(JobClock, ProcessesOfOneMachineHaveOneClock) {
  for (const Clock& clock : measure_all({machine("a", 0), machine("a", 0), machine("a", 0)})) {
    EXPECT_EQ(clock.offset, 0);
    EXPECT_EQ(clock.error, 0);
  }
}

TEST(JobClock, OffsetsOfOtherMachinesAreRightWithinTheErrorThatIsStated) {
  constexpr std::int64_t kAhead = 5'000'000'000;
  const auto clocks = measure_all({machine("a", 0), machine("b", kAhead), machine("c", -3 * kAhead)});
  EXPECT_EQ(clocks[0].offset, 0);
  EXPECT_GT(clocks[1].error, 0);
  EXPECT_LE(std::abs(clocks[1].offset + kAhead), clocks[1].error);
  EXPECT_LE(std::abs(clocks[2].offset - 3 * kAhead), clocks[2].error);
}

TEST(JobClock, ARankThatDoesNotComeIsATimeout) {
  harness::MemoryBootstrap store;
  try {
    measure({1, 2}, store, machine("b", 0), Deadline::in(std::chrono::milliseconds(10)));
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
