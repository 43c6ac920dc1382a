// SPDX-License-Identifier: Apache-2.0
// Hosts lose sight of each other in the middle of all_reduces: a cable is pulled, which nobody
// reports. At most one part makes a new group and trains on; the other ranks get PeerLost, which
// says why they cannot.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/group.h>
#include <weft/parallel.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/group_of_the_living.h>
#include <weft/tests/harness/hosts.h>
#include <weft/tests/harness/ranks.h>

namespace {

// Divides the times after which the kernel takes a machine for silent.
int hurry = 5;

}  // namespace

// The libraries that this program loads call this one.
extern "C" int setsockopt(int socket, int level, int name, const void* value,
                          socklen_t bytes) noexcept {
  const bool is_time = level == IPPROTO_TCP &&
                       (name == TCP_KEEPIDLE || name == TCP_KEEPINTVL || name == TCP_USER_TIMEOUT);
  const int less = is_time ? std::max(1, *static_cast<const int*>(value) / hurry) : 0;
  return static_cast<int>(
      ::syscall(SYS_setsockopt, socket, level, name, is_time ? &less : value, bytes));
}

namespace weft {
namespace {

using harness::error_of;
using harness::group_of_the_living;
using harness::Hosts;
using harness::Processes;
using testing::HasSubstr;

struct Case {
  const char* name;
  std::vector<int> host_of;  // by rank
  std::vector<int> unplugged, switched_off;
  std::set<int> go_on;
  bool is_mended = false;  // when the ranks that go on have noticed it; the others notice later
  std::vector<int> killed = {};  // before that
  std::string backend = "weft";
  bool is_everyday = false;
  std::vector<int> apart = {};  // hosts that still reach each other, and no others
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

void train(ProcessGroup& group) {
  const auto sum = torch::ones({1000});
  group.all_reduce(sum).wait();
  EXPECT_EQ(sum.max().item<float>(), static_cast<float>(group.size()));
  torch::nn::Linear model(4, 2);
  DistributedDataParallel ddp(model, group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    ddp(torch::ones({3, 4}) * group.rank()).sum().backward();
    optimizer.step();
  }
  const auto most = model->weight.detach().clone(), least = most.clone();
  group.all_reduce(most, ReduceOp::Max).wait();
  group.all_reduce(least, ReduceOp::Min).wait();
  EXPECT_TRUE(torch::equal(most, least));
}

// A file that the test makes.
struct Signal {
  std::string path;
  void give() const { std::ofstream(path) << "now\n"; }
  void await() const {
    ASSERT_TRUE(
        harness::comes_true([this] { return std::filesystem::exists(path); }, harness::kLimit));
  }
};

void be_rank(int rank, const Case& one, const Signal& regroup, const Signal& end) {
  ProcessGroupOptions options;
  options.init_method = "tcp://" + Hosts::address(one.host_of[0]) + ":29577";
  options.world_size = static_cast<int>(one.host_of.size());
  options.rank = rank;
  options.backend = one.backend;
  options.timeout = std::chrono::seconds(1000);  // longer than the test may run
  harness::unset_rank_variables();
  auto group = init_process_group(options);
  group.barrier().wait();
  Processes::say("ready");
  const auto data = torch::ones({100'000});
  const Error lost = error_of([&] {
    for (;;) group.all_reduce(data).wait();
  });
  EXPECT_EQ(lost.blame(), Blame::PeerLost) << lost.what();
  Processes::say("lost");
  regroup.await();
  if (one.go_on.contains(rank)) {
    auto made = group_of_the_living(group);
    EXPECT_EQ(made.size(), static_cast<int>(one.go_on.size()));
    train(made);
  } else {
    const Error out = error_of([&] { group_of_the_living(group); });
    EXPECT_EQ(out.blame(), Blame::PeerLost) << out.what();
    EXPECT_THAT(out.text(), HasSubstr("may go on as the group"));
  }
  Processes::say("done");
  end.await();  // a rank that has ended does not count for the others
}

class Partition : public testing::TestWithParam<Case> {};

TEST_P(Partition, AtMostOnePartGoesOn) {
  const Case& one = GetParam();
  const int ranks = static_cast<int>(one.host_of.size());
  Hosts hosts(1 + *std::max_element(one.host_of.begin(), one.host_of.end()));
  if (!hosts.why_not().empty()) GTEST_SKIP() << hosts.why_not();
  const harness::Folder folder;
  const Signal regroup{folder.path() + "/regroup"}, end{folder.path() + "/end"};
  Processes processes(ranks, [&](int rank) {
    if (!hosts.enter(one.host_of[static_cast<std::size_t>(rank)]))
      return Processes::say("not permitted");
    Processes::say("there");
    if (one.is_mended && !one.go_on.contains(rank)) hurry = 1;
    be_rank(rank, one, regroup, end);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    if (processes.next_word(rank) != "there") GTEST_SKIP() << Hosts::kMayNotEnter;
  }
  const std::set<int> killed(one.killed.begin(), one.killed.end());
  const auto wait_for = [&](const std::string& word, bool by_all) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (!killed.contains(rank) && (by_all || one.go_on.contains(rank)))
        processes.wait_for(rank, word);
    }
  };
  for (int rank = 0; rank < ranks; ++rank) processes.wait_for(rank, "ready");
  for (const int rank : one.killed) processes.signal(rank, SIGKILL);
  if (!killed.empty()) wait_for("lost", /*by_all=*/true);
  for (const int host : one.unplugged) hosts.unplug(host);
  for (const int host : one.switched_off) hosts.switch_off(host);
  if (!one.apart.empty()) hosts.put_apart(one.apart);
  if (one.is_mended) {
    wait_for("lost", /*by_all=*/false);
    for (const int host : one.unplugged) hosts.plug(host);
  }
  regroup.give();
  wait_for("done", /*by_all=*/true);
  end.give();
  processes.expect_success(killed);
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      // Rank 0 hosts the store, and is the root of membership's tree.
      {.name = "MajorityWithoutRankZero",
       .host_of = {0, 0, 1, 1, 1},
       .unplugged = {0},
       .go_on = {2, 3, 4},
       .is_everyday = true},
      {.name = "RanksThatEndedDoNotCount",
       .host_of = {0, 0, 1, 1, 1},
       .unplugged = {1},
       .go_on = {0, 1},
       .killed = {2, 4},
       .is_everyday = true},
      {.name = "MendedTooLate",
       .host_of = {0, 0, 1, 1},
       .unplugged = {1},
       .go_on = {0, 1},
       .is_mended = true,
       .is_everyday = true},
      {.name = "MajorityWithRankZero",
       .host_of = {0, 0, 0, 1, 1},
       .unplugged = {1},
       .go_on = {0, 1, 2}},
      // The kernel of host 2 knows no way to the others, which is no proof that they have ended.
      {.name = "DeviceSwitchedOff",
       .host_of = {0, 1, 1, 1, 2, 2},
       .switched_off = {2},
       .go_on = {0, 1, 2, 3}},
      {.name = "OverGloo",
       .host_of = {0, 0, 1, 1, 1},
       .unplugged = {0},
       .go_on = {2, 3, 4},
       .backend = "gloo"},
      {.name = "HalfWithTheLowestRank", .host_of = {0, 0, 1, 1}, .unplugged = {1}, .go_on = {0, 1}},
      {.name = "OneOfThreeHosts",
       .host_of = {0, 0, 1, 1, 2, 2},
       .unplugged = {0},
       .go_on = {2, 3, 4, 5}},
      // Each rank of the other part would in turn be the parent of those of this one; waiting for
      // all of them, one by one, would take a time limit for each.
      {.name = "TwoOfSixHosts",
       .host_of = {0, 1, 2, 3, 4, 5},
       .go_on = {0, 1, 2, 3},
       .apart = {4, 5}},
      {.name = "FourOfNineHosts",
       .host_of = {0, 1, 2, 3, 4, 5, 6, 7, 8},
       .go_on = {4, 5, 6, 7, 8},
       .apart = {0, 1, 2, 3}},
      {.name = "AllHostsApart", .host_of = {0, 0, 1, 1, 2, 2}, .unplugged = {0, 1, 2}, .go_on = {}},
      // Each rank of host 0 in turn would be the parent of those that live; waiting for all of
      // them,
      // one by one, would take longer than the test may run.
      {.name = "HostOfManyRanks",
       .host_of = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1},
       .unplugged = {0},
       .go_on = {8, 9, 10, 11, 12, 13, 14, 15, 16}},
      // Rank 18's parent in the tree, and its parent's parent, are behind the same cable.
      {.name = "RanksNextToEachOtherApart",
       .host_of = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0},
       .unplugged = {0},
       .go_on = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18}},
  };
  if (!harness::runs_all_settings())
    std::erase_if(all, [](const Case& one) { return !one.is_everyday; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Group, Partition, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace weft
