// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/operation.h>

namespace weft::trace {
namespace {

using What = HostTime::Doing::What;

constexpr HostTime::Doing kNothing{};
constexpr HostTime::Doing kServing{What::Serving, 0};

// The test's clock: time passes only in pass().
std::int64_t time_now = 1000;
void pass(std::int64_t time) { time_now += time; }

class HostTimes : public testing::Test {
 protected:
  HostTimes() { time_now = 1000; }
  HostTime::Doing waiting(const char* backend) { return {What::Waiting, time_.place(backend)}; }
  std::int64_t waited(const std::string& backend) {
    for (const HostTime::Waited& one : time_.waited()) {
      if (one.backend == backend) return one.nanoseconds;
    }
    return -1;
  }
  HostTime time_{[] { return time_now; }};
};

TEST_F(HostTimes, CountWaitsForEachBackend) {
  pass(5);
  time_.change(kNothing, waiting("gloo"));
  pass(7);
  EXPECT_EQ(waited("gloo"), 7) << "a wait that has not ended counts";
  pass(3);
  time_.change(waiting("gloo"), kNothing);
  pass(100);
  time_.change(kNothing, waiting("rpc"));
  pass(4);
  time_.change(waiting("rpc"), kNothing);
  EXPECT_EQ(waited("gloo"), 10);
  EXPECT_EQ(waited("rpc"), 4);
  EXPECT_EQ(waited("nccl"), -1);
}

TEST_F(HostTimes, ServingMomentsAreNoWait) {
  time_.change(kNothing, waiting("rpc"));
  pass(10);
  time_.change(kNothing, kServing);  // on another thread
  pass(20);
  time_.change(kServing, waiting("gloo"));  // the served call waits
  pass(5);
  time_.change(waiting("gloo"), kServing);
  pass(30);
  time_.change(kServing, kNothing);
  pass(2);
  time_.change(waiting("rpc"), kNothing);
  EXPECT_EQ(waited("rpc"), 12);
  EXPECT_EQ(waited("gloo"), 5);
}

TEST_F(HostTimes, ConcurrentWaitsCountOnce) {
  time_.change(kNothing, waiting("gloo"));
  time_.change(kNothing, waiting("rpc"));
  pass(10);
  time_.change(waiting("rpc"), kNothing);
  pass(5);
  time_.change(waiting("gloo"), kNothing);
  EXPECT_EQ(waited("rpc"), 10) << "for the backend that a thread began to wait for last";
  EXPECT_EQ(waited("gloo"), 5);
}

TEST_F(HostTimes, BackendsBeyondTheRoomShareAPlace) {
  for (std::size_t i = 0; i < Progress::kBackends; ++i)
    EXPECT_EQ(time_.place("backend" + std::to_string(i)), i);
  EXPECT_EQ(time_.place("backend2"), 2u);
  EXPECT_EQ(time_.place("one more"), Progress::kBackends - 1);
  EXPECT_EQ(time_.waited().size(), Progress::kBackends);
  HostTime other([] { return time_now; });
  EXPECT_EQ(other.place("a name that is longer than a page has room for"),
            other.place("a name that is longer, and other"));
}

TEST_F(HostTimes, ShareCoversTheLastEndedSteps) {
  EXPECT_TRUE(std::isnan(time_.share_of_steps()));
  time_.step();
  EXPECT_TRUE(std::isnan(time_.share_of_steps())) << "no step has ended yet";
  for (std::size_t i = 0; i < 100; ++i) {
    pass(i < 50 ? 90 : 60);
    time_.change(kNothing, waiting("gloo"));
    pass(i < 50 ? 10 : 40);
    time_.change(waiting("gloo"), kNothing);
    time_.step();
    if (i == 0) EXPECT_DOUBLE_EQ(time_.share_of_steps(), 0.1);
  }
  EXPECT_DOUBLE_EQ(time_.share_of_steps(), 0.4) << "the first steps are forgotten";
  pass(1000);
  EXPECT_DOUBLE_EQ(time_.share_of_steps(), 0.4) << "the step that runs does not count yet";
}

TEST_F(HostTimes, AreShownInThePage) {
  time_.change(kNothing, waiting("shm"));
  pass(10);
  Progress page;
  time_.show_in(page);
  EXPECT_EQ(page.backends[0].waited, 10u);
  EXPECT_EQ(page.backends[0].name[0], 's');
  EXPECT_EQ(page.backends[0].name[3], 0);
  EXPECT_EQ(page.waiting_since, 1010) << "the wait must be shown as going on";
  EXPECT_EQ(page.waiting_for, 0u);
  pass(5);
  time_.change(waiting("shm"), kNothing);
  EXPECT_EQ(page.backends[0].waited, 15u);
  EXPECT_EQ(page.waiting_since, 0);
}

// The scopes as product code uses them, in a process of their own, since their counts last as long
// as the process.
TEST(HostTimeScopes, NestAndStartAnewInChildren) {
  const pid_t process = ::fork();
  if (process == 0) {
    const auto waited = [] { return host_time().waited(); };
    const auto expect = [](bool right, int line) {
      if (!right) ::_exit(line);
    };
    { const WaitScope uncounted("gloo"); }
    expect(waited().empty(), __LINE__);
    count_host_time();
    host_time().use_clock([] { return time_now; });
    {
      const WaitScope waits("rpc");
      pass(10);
      {
        const ServeScope serves;  // the waiting thread runs a call
        pass(100);
        const WaitScope deeper("gloo");
        pass(3);
      }
      pass(1);
      std::thread([] {
        const ServeScope serves;
        pass(1000);
      }).join();
    }
    pass(5000);
    expect(waited().size() == 2 && waited()[0].nanoseconds == 11 && waited()[1].nanoseconds == 3,
           __LINE__);
    const WaitScope waits("gloo");
    pass(7);
    const pid_t child = ::fork();
    if (child == 0) {
      pass(20);
      // The child waits as the forking thread did, but counts only the time that passed here.
      ::_exit(waited()[0].nanoseconds == 0 && waited()[1].nanoseconds == 20 ? 0 : 1);
    }
    int state = 0;
    ::waitpid(child, &state, 0);
    expect(state == 0, __LINE__);
    expect(waited()[1].nanoseconds == 10, __LINE__);
    ::_exit(0);
  }
  int state = 0;
  ::waitpid(process, &state, 0);
  EXPECT_EQ(state, 0) << "line " << WEXITSTATUS(state);
}

}  // namespace
}  // namespace weft::trace
