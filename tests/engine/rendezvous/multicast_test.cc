// SPDX-License-Identifier: Apache-2.0
// tcp://[multicast address]:port over the loopback interface, and over a virtual cable between two
// network namespaces.
#include <cstdlib>

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Nothing leaves this machine. (The environment is read once, at the first use of Weft.)
const bool kOnLoopback = ::setenv("WEFT_SOCKET_IFNAME", "lo", 1) == 0;

// A meeting place that no other test uses at this moment.
std::string meeting_place(const std::string& address = "239.77.7.7") {
  return "tcp://[" + address + "]:" + std::to_string(launch::free_port());
}

ProcessGroupOptions at(const std::string& place, int world_size, std::optional<int> rank = {}) {
  ProcessGroupOptions options;
  options.init_method = place;
  options.world_size = world_size;
  options.rank = rank;
  options.timeout = seconds(30);
  return options;
}

// Expects that all ranks have come, each with a different rank.
void expect_whole(ProcessGroup& group, int size) {
  EXPECT_EQ(group.size(), size);
  const auto seen = torch::zeros({size}, at::kInt);
  seen[group.rank()] = 1;
  group.all_reduce(seen).wait();
  EXPECT_TRUE(torch::equal(seen, torch::ones({size}, at::kInt))) << seen;
}

// Runs first in this process, because its children must not find the environment read already.
TEST(Multicast, ReachesAnotherNetworkNamespace) {
  if (::geteuid() != 0) GTEST_SKIP() << "creating network namespaces needs root";
  const int allowed = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  const std::string place = "tcp://[239.77.7.8]:47000";
  Processes processes(2, [=](int rank) {
    if (::unshare(CLONE_NEWNET) != 0) {
      Processes::say("not permitted");
      return;
    }
    Processes::say("alone");
    std::uint64_t one = 0;
    ASSERT_EQ(::read(allowed, &one, sizeof one), static_cast<ssize_t>(sizeof one));
    ::setenv("WEFT_SOCKET_IFNAME", "weft0", 1);
    harness::unset_rank_variables();
    auto group = init_process_group(at(place, 2));
    expect_whole(group, 2);
    static_cast<void>(rank);
  });
  for (int rank = 0; rank < 2; ++rank) {
    if (processes.next_word(rank) != "alone")
      GTEST_SKIP() << "this container may not create network namespaces";
  }
  const auto inside = [&](int rank, const std::string& command) {
    return "nsenter -t " + std::to_string(processes.process(rank)) + " -n ip " + command;
  };
  const std::string cable = "ip link add weft0 netns " + std::to_string(processes.process(0)) +
                            " type veth peer name weft0 netns " +
                            std::to_string(processes.process(1));
  for (const std::string& command :
       {cable, inside(0, "addr add 10.77.7.1/24 dev weft0"),
        inside(1, "addr add 10.77.7.2/24 dev weft0"), inside(0, "link set lo up"),
        inside(1, "link set lo up"), inside(0, "link set weft0 up"),
        inside(1, "link set weft0 up")}) {
    if (std::system((command + " 2>&1").c_str()) != 0) GTEST_SKIP() << "failed: " << command;
  }
  const std::uint64_t both = 2;
  ASSERT_EQ(::write(allowed, &both, sizeof both), static_cast<ssize_t>(sizeof both));
  processes.expect_success();
}

TEST(Multicast, GivesRanksToProcessesWithoutOne) {
  ASSERT_TRUE(kOnLoopback);
  const std::string place = meeting_place();
  Processes processes(4, [=](int) {
    harness::unset_rank_variables();
    auto group = init_process_group(at(place + "?world_size=4", 4));
    expect_whole(group, 4);
  });
  processes.expect_success();
}

TEST(Multicast, KeepsGivenRanks) {
  const std::string place = meeting_place();
  harness::run_threads(3, [&](int thread) {
    // The thread without a rank gets the one that is left. (RANK is not set here.)
    auto options = at(place, 3);
    if (thread > 0) options.rank = 3 - thread;
    auto group = init_process_group(options);
    EXPECT_EQ(group.rank(), thread == 0 ? 0 : 3 - thread);
    expect_whole(group, 3);
  });
}

TEST(Multicast, NamedJobsShareAnAddress) {
  const std::string place = meeting_place();
  harness::run_threads(5, [&](int thread) {
    auto options = at(place, thread < 2 ? 2 : 3);
    options.group_name = thread < 2 ? "small" : "large";
    auto group = init_process_group(options);
    expect_whole(group, thread < 2 ? 2 : 3);
  });
}

TEST(Multicast, ServesOneJobAfterAnother) {
  const std::string place = meeting_place();
  for (int job = 0; job < 2; ++job) {
    harness::run_threads(2, [&](int) {
      auto group = init_process_group(at(place, 2));
      expect_whole(group, 2);
    });
  }
}

TEST(Multicast, TimeoutNamesTheArrivedProcesses) {
  const std::string place = meeting_place();
  harness::run_threads(2, [&](int) {
    auto options = at(place, 3);
    options.timeout = milliseconds(700);
    const auto error = error_of([&] { init_process_group(options); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_NE(error.text().find("of 3 processes (this one"), std::string::npos) << error.text();
  });
}

TEST(Multicast, DuplicateRankIsRefusedOnBothSides) {
  const std::string place = meeting_place();
  harness::run_threads(2, [&](int) {
    const auto error = error_of([&] { init_process_group(at(place, 3, 1)); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_NE(error.text().find("rank 1 is given to this process and to the process at 127.0.0.1"),
              std::string::npos)
        << error.text();
  });
}

TEST(Multicast, DifferentWorldSizesAreRefused) {
  const std::string place = meeting_place();
  harness::run_threads(2, [&](int thread) {
    const auto error = error_of([&] { init_process_group(at(place, 2 + thread)); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_NE(error.text().find("gives the world size"), std::string::npos) << error.text();
  });
}

TEST(Multicast, NeedsAWorldSize) {
  auto options = at(meeting_place(), 2);
  options.world_size.reset();
  const auto error = error_of([&] { init_process_group(options); });
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_NE(error.text().find("no world size"), std::string::npos) << error.text();
}

}  // namespace
}  // namespace weft
