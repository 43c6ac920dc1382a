// SPDX-License-Identifier: Apache-2.0
// A group over two hosts with two ranks each: network namespaces with a cable between them, in
// which the kernel shows another boot. Ranks of a host use shared memory, the others sockets, and
// collectives send each host's data over the cable once.
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Processes;

constexpr int kRanks = 4;
constexpr const char* kBootId = "/proc/sys/kernel/random/boot_id";

bool shell(const std::string& command) {
  return std::system(("( " + command + " ) >/dev/null 2>&1").c_str()) == 0;
}

// Two network namespaces, which processes enter by their descriptors.
struct Cable {
  int ends[2] = {-1, -1};
  std::string why_not;

  Cable() {
    for (int& end : ends) {
      // A namespace belongs to a thread.
      std::thread([&] {
        if (::unshare(CLONE_NEWNET) == 0)
          end = ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
      }).join();
      if (end < 0) {
        why_not = "no network namespaces may be made";
        return;
      }
    }
    const std::string first = path(0), second = path(1);
    const auto inside = [](const std::string& space, const std::string& command) {
      return "nsenter --net=" + space + " ip " + command;
    };
    for (const std::string& command :
         {inside(first, "link add weft0 type veth peer name weft0 netns " + second),
          inside(first, "addr add 10.77.9.1/24 dev weft0"),
          inside(second, "addr add 10.77.9.2/24 dev weft0"), inside(first, "link set lo up"),
          inside(second, "link set lo up"), inside(first, "link set weft0 up"),
          inside(second, "link set weft0 up")}) {
      if (!shell(command)) {
        why_not = "failed: " + command;
        return;
      }
    }
  }
  ~Cable() {
    for (const int end : ends) ::close(end);
  }
  std::string path(int host) const {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(ends[host]);
  }
};

// Moves this process to the host; to other processes there it looks like another boot.
bool enter(const Cable& cable, int host, const std::string& boot_id) {
  return ::setns(cable.ends[host], CLONE_NEWNET) == 0 && ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount(boot_id.c_str(), kBootId, nullptr, MS_BIND, nullptr) == 0;
}

// Bytes that this host has sent over the cable.
std::uint64_t bytes_sent() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find("weft0:");
    if (colon == std::string::npos) continue;
    std::istringstream fields(line.substr(colon + 6));
    std::uint64_t value = 0;
    for (int field = 0; field < 9; ++field) fields >> value;
    return value;
  }
  ADD_FAILURE() << "no device weft0";
  return 0;
}

at::Tensor numbers_of(int rank, std::int64_t count) {
  return torch::arange(count, at::kFloat).remainder(97) + rank;
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
  group.barrier().wait();
}

void be_rank(int rank) {
  ProcessGroupOptions options;
  options.init_method = "tcp://10.77.9.1:29577";
  options.world_size = kRanks;
  options.rank = rank;
  options.backend = "weft";
  auto group = init_process_group(options);
  for (int peer = 0; peer < kRanks; ++peer) {
    if (peer != rank) EXPECT_EQ(group.transport(peer), peer / 2 == rank / 2 ? "shm" : "tcp");
  }
  for (const std::int64_t count : {1, 1000, 300'001}) expect_right(group, count);
  constexpr std::uint64_t kBytes = 16 << 20;
  const auto large = torch::ones({kBytes / 4});
  group.barrier().wait();
  const auto before = bytes_sent();
  group.all_reduce(large).wait();
  group.barrier().wait();
  const auto sent = bytes_sent() - before;
  EXPECT_EQ(large[0].item<float>(), kRanks);
  // A host sends 2 (h - 1) / h of the bytes; flat algorithms send twice as many. The
  // rest are the packets' headers.
  EXPECT_GE(sent, kBytes);
  EXPECT_LT(sent, kBytes + kBytes / 4);
  group.barrier().wait();
}

TEST(TwoHosts, EachHostsDataCrossesTheNetworkOnce) {
  if (::geteuid() != 0) GTEST_SKIP() << "creating network namespaces needs root";
  const Cable cable;
  if (!cable.why_not.empty()) GTEST_SKIP() << cable.why_not;
  const harness::Folder folder;
  const std::string boot_id = folder.path() + "/boot_id";
  std::ofstream(boot_id) << "00000000-1111-2222-3333-444444444444\n";
  Processes processes(kRanks, [&](int rank) {
    // Ranks 0 and 1 share a host, and 2 and 3.
    const int host = rank / 2;
    const std::string id = host == 0 ? std::string(kBootId) : boot_id;
    if (!enter(cable, host, id)) return Processes::say("not permitted");
    Processes::say("there");
    ::setenv("WEFT_SOCKET_IFNAME", "weft0", 1);
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
    be_rank(rank);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    if (processes.next_word(rank) != "there")
      GTEST_SKIP() << "this container may not mount over " << kBootId;
  }
  processes.expect_success();
}

}  // namespace
}  // namespace weft
