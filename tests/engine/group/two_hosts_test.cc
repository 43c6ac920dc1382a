// SPDX-License-Identifier: Apache-2.0
// Groups whose pairs of ranks use different transports: over two hosts with two ranks each, where
// collectives send each host's data over the network once, and over one host with two users.
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/hosts.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Hosts;
using harness::Processes;

constexpr int kRanks = 4;

struct Traffic {
  std::uint64_t bytes = 0, packets = 0;
  Traffic operator-(const Traffic& before) const {
    return {bytes - before.bytes, packets - before.packets};
  }
};

// Returns the traffic that this host has sent over the cable.
Traffic sent() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find("weft0:");
    if (colon == std::string::npos) continue;
    std::istringstream fields(line.substr(colon + 6));
    Traffic traffic;
    std::uint64_t received = 0;
    for (int field = 0; field < 8; ++field) fields >> received;
    fields >> traffic.bytes >> traffic.packets;
    return traffic;
  }
  ADD_FAILURE() << "no device weft0";
  return {};
}

at::Tensor numbers_of(int rank, std::int64_t count) {
  return torch::arange(count, at::kFloat).remainder(97) + rank;
}

// The forms of an all_to_all in which every rank sends as much to each.
enum class Form { Single, Splits, Lists };

// Rank r sends numbers + r to rank 0, as many more to rank 1, and so on.
void expect_exchanged(ProcessGroup& group, std::int64_t count,
                      const std::function<Form(int rank)>& form_of) {
  const auto input = numbers_of(group.rank(), kRanks * count);
  auto output = torch::zeros_like(input);
  const std::vector<std::int64_t> splits(kRanks, count);
  switch (form_of(group.rank())) {
    case Form::Single: group.all_to_all_single(output, input).wait(); break;
    case Form::Splits: group.all_to_all_single(output, input, splits, splits).wait(); break;
    case Form::Lists: group.all_to_all(output.chunk(kRanks), input.chunk(kRanks)).wait(); break;
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto part = numbers_of(rank, kRanks * count).narrow(0, group.rank() * count, count);
    EXPECT_TRUE(torch::equal(output.narrow(0, rank * count, count), part)) << count;
  }
}

// Runs every collective that has two levels; rank r has numbers + r.
void expect_right(ProcessGroup& group, std::int64_t count) {
  const auto mine = numbers_of(group.rank(), count);
  const auto sum = numbers_of(0, count) * kRanks + 0 + 1 + 2 + 3;
  auto data = mine.clone();
  group.all_reduce(data).wait();
  EXPECT_TRUE(torch::equal(data, sum)) << count;
  for (int root = 0; root < kRanks; ++root) {
    data = mine.clone();
    group.broadcast(data, root).wait();
    EXPECT_TRUE(torch::equal(data, numbers_of(root, count))) << count;
    data = mine.clone();
    group.reduce(data, root).wait();
    EXPECT_TRUE(torch::equal(data, group.rank() == root ? sum : mine)) << count;
  }
  auto all = torch::zeros({kRanks, count});
  group.all_gather_into(all, mine).wait();
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_TRUE(torch::equal(all[rank], numbers_of(rank, count))) << count;
  data = torch::zeros({count});
  const auto repeated = mine.repeat({kRanks});
  group.reduce_scatter_into(data, repeated).wait();
  EXPECT_TRUE(torch::equal(data, sum)) << count;
  expect_exchanged(group, count, [](int) { return Form::Single; });
  group.barrier().wait();
}

// Four ranks send each other numbers: two messages each way for each rank, or one for all.
void expect_gathered_messages(ProcessGroup& group) {
  constexpr int kCalls = 100;
  const auto packets_of = [&](Form form) {
    group.barrier().wait();
    const Traffic before = sent();
    for (int call = 0; call < kCalls; ++call) expect_exchanged(group, 1, [&](int) { return form; });
    group.barrier().wait();
    return (sent() - before).packets;
  };
  const auto gathered = packets_of(Form::Single), single = packets_of(Form::Splits);
  EXPECT_GE(single, 4 * kCalls);
  EXPECT_LT(gathered, single * 3 / 4);  // besides, packets confirm others
}

void be_rank(int rank) {
  ProcessGroupOptions options;
  options.init_method = "tcp://" + Hosts::address(0) + ":29577";
  options.world_size = kRanks;
  options.rank = rank;
  options.backend = "weft";
  auto group = init_process_group(options);
  for (int peer = 0; peer < kRanks; ++peer) {
    if (peer != rank) EXPECT_EQ(group.transport(peer), peer / 2 == rank / 2 ? "shm" : "tcp");
  }
  for (const std::int64_t count : {1, 1000, 300'001}) expect_right(group, count);
  // A rank that gives equal splits, or lists, meets those that do not.
  for (int round = 0; round < 3 * kRanks; ++round) {
    expect_exchanged(group, round % 2 == 0 ? 1 : 300, [&](int rank) {
      return rank == round % kRanks ? Form::Splits : rank == round % 7 ? Form::Lists : Form::Single;
    });
  }
  expect_gathered_messages(group);
  constexpr std::uint64_t kBytes = 16 << 20;
  const auto large = torch::ones({kBytes / 4});
  group.barrier().wait();
  const Traffic before = sent();
  group.all_reduce(large).wait();
  group.barrier().wait();
  const auto bytes = (sent() - before).bytes;
  EXPECT_EQ(large[0].item<float>(), kRanks);
  // A host sends 2 (h - 1) / h of the bytes; flat algorithms send twice as many. The
  // rest are the packets' headers.
  EXPECT_GE(bytes, kBytes);
  EXPECT_LT(bytes, kBytes + kBytes / 4);
  group.barrier().wait();
}

TEST(TwoHosts, EachHostsDataCrossesTheNetworkOnce) {
  const Hosts hosts(2);
  if (!hosts.why_not().empty()) GTEST_SKIP() << hosts.why_not();
  Processes processes(kRanks, [&](int rank) {
    // Ranks 0 and 1 share a host, and 2 and 3.
    if (!hosts.enter(rank / 2)) return Processes::say("not permitted");
    Processes::say("there");
    harness::unset_rank_variables();
    be_rank(rank);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    if (processes.next_word(rank) != "there") GTEST_SKIP() << Hosts::kMayNotEnter;
  }
  processes.expect_success();
}

// Makes this process one of another user, into which others of that user may look.
bool become_another_user() {
  constexpr uid_t kOther = 12345;
  return ::setresgid(kOther, kOther, kOther) == 0 && ::setresuid(kOther, kOther, kOther) == 0 &&
         ::prctl(PR_SET_DUMPABLE, 1) == 0;
}

// Four ranks of one host, of which the last two belong to another user.
class TwoUsers : public testing::Test {
 protected:
  // Returns null, and the test is skipped, if this process may not do that.
  static std::unique_ptr<Processes> run(const std::function<void(int rank)>& body) {
    auto processes = std::make_unique<Processes>(kRanks, [body](int rank) {
      if (rank >= 2 && !become_another_user()) return Processes::say("not permitted");
      Processes::say("there");
      body(rank);
    });
    const auto skip = [] { GTEST_SKIP() << "changing the user needs root"; };
    for (int rank = 0; rank < kRanks; ++rank) {
      if (processes->next_word(rank) == "there") continue;
      skip();
      return nullptr;
    }
    return processes;
  }
};

TEST_F(TwoUsers, UseTcpBetweenThem) {
  const auto processes = run([](int rank) {
    auto group = init_process_group({.backend = "weft"});
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer != rank) EXPECT_EQ(group.transport(peer), peer / 2 == rank / 2 ? "shm" : "tcp");
    }
    for (const std::int64_t count : {1, 1000, 300'001}) expect_right(group, count);
  });
  if (processes) processes->expect_success();
}

// The program has chosen it.
TEST_F(TwoUsers, ShmThatIsForcedIsAnError) {
  const auto processes = run([](int) {
    Processes::say(harness::error_of([] { init_process_group({.backend = "shm"}); }).text());
    for (;;) ::pause();
  });
  for (int rank = 0; processes && rank < kRanks; ++rank) {
    const std::string why = processes->next_word(rank);
    EXPECT_NE(why, "no error was thrown") << rank;
    if (rank != 0) continue;  // rank 0 hosts the store, and ends it when it fails
    // Its own reason, or that of a rank which told it first.
    EXPECT_NE(why.find("cannot reach rank"), std::string::npos) << why;
    EXPECT_TRUE(why.find("belongs to user") != std::string::npos ||
                why.find("runs as another user") != std::string::npos)
        << why;
  }
}

}  // namespace
}  // namespace weft
