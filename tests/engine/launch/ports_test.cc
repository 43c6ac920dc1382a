// SPDX-License-Identifier: Apache-2.0
// Ports that are chosen for programs that listen later.
#include <csignal>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/engine/launch/process.h>
#include <weft/engine/launch/reserved_port.h>

namespace weft::launch {
namespace {

// Eight ports for each process, outside of the range from which free_port() chooses.
int first_of_eight() { return 8192 + static_cast<int>(::getpid()) % 1000 * 8; }

TEST(ReservedPort, IsChosenOnceUntilItIsDropped) {
  const int port = first_of_eight();
  auto first = ReservedPort::of(port);
  ASSERT_TRUE(first);
  EXPECT_FALSE(ReservedPort::of(port));
  first.reset();
  EXPECT_TRUE(ReservedPort::of(port));
}

TEST(ReservedPort, LastsUntilTheLastForkedChildEnds) {
  const int port = first_of_eight();
  auto first = ReservedPort::of(port);
  ASSERT_TRUE(first);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  first.reset();
  EXPECT_FALSE(ReservedPort::of(port));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(ReservedPort::of(port));
}

TEST(ReservedPort, ProcessesNeverChooseTheSame) {
  constexpr int kEach = 4;
  const int begin = first_of_eight();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  std::vector<ReservedPort> held;
  for (int i = 0; i < kEach; ++i) held.push_back(ReservedPort::choose(begin, begin + 2 * kEach));
  if (child == 0) {
    for (const ReservedPort& one : held) {
      const int port = one.number();
      if (::write(ends[1], &port, sizeof port) != sizeof port) ::_exit(1);
    }
    ::pause();
    ::_exit(0);
  }
  std::multiset<int> chosen;
  for (const ReservedPort& one : held) chosen.insert(one.number());
  for (int i = 0; i < kEach; ++i) {
    int port = 0;
    ASSERT_EQ(::read(ends[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    chosen.insert(port);
  }
  EXPECT_EQ(std::set<int>(chosen.begin(), chosen.end()).size(), chosen.size())
      << testing::PrintToString(chosen);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const int end : ends) ::close(end);
}

TEST(FreePort, KeepsTheLastEightReserved) {
  std::vector<int> ports;
  for (int i = 0; i < 9; ++i) ports.push_back(free_port());
  EXPECT_TRUE(ReservedPort::of(ports.front()));
  for (std::size_t i = 1; i < ports.size(); ++i) EXPECT_FALSE(ReservedPort::of(ports[i])) << i;
}

}  // namespace
}  // namespace weft::launch
