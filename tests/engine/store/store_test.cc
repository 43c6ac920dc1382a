// SPDX-License-Identifier: Apache-2.0
// Connections of groups and agents to a store that the program provides.
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/types.h>

#include <weft/engine/store/store.h>
#include <weft/group.h>
#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

// A store of this process, and clients of it.
class TcpStore : public testing::Test {
 protected:
  TcpStore() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = 0;
    options.waitWorkers = false;
    host_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  StorePointer client() const {
    c10d::TCPStoreOptions options;
    options.port = host_->getPort();
    options.timeout = seconds(60);
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  // Connections that have been accepted and are open at both ends.
  std::size_t connections() const {
    char port[8];
    std::snprintf(port, sizeof port, ":%04X", host_->getPort());
    std::size_t count = 0;
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      std::ifstream lines(table);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream fields(line);
        std::string number, local, remote, state;
        fields >> number >> local >> remote >> state;
        if (local.ends_with(port) && state == "01") ++count;
      }
    }
    return count;
  }
  bool comes_to(std::size_t wanted) const {
    return harness::comes_true([&] { return connections() == wanted; });
  }

  c10::intrusive_ptr<c10d::TCPStore> host_;
};

ProcessGroup join(const StorePointer& store, int rank, const std::string& name,
                  const std::string& backend = "") {
  return init_process_group({.backend = backend,
                             .rank = rank,
                             .world_size = 2,
                             .store = c10::make_intrusive<c10d::PrefixStore>(name, store),
                             .group_name = name,
                             .timeout = seconds(40),
                             .device = c10::Device(c10::kCPU)});
}

TEST_F(TcpStore, GroupsAndAgentsShareAConnection) {
  const std::vector<StorePointer> stores{client(), client()};
  const std::size_t before = connections();
  harness::run_threads(2, [&](int rank) {
    const auto& store = stores[static_cast<std::size_t>(rank)];
    std::vector<ProcessGroup> groups;
    for (int i = 0; i < 6; ++i) {
      const std::string backend = i % 3 == 0 ? "gloo" : i % 3 == 1 ? "shm" : "tcp";
      groups.push_back(join(store, rank, "group" + std::to_string(i), backend));
      groups.push_back(groups.back().new_group({0, 1}));
      groups.push_back(groups.back().split(0, 0));
    }
    auto agent = rpc::init("worker" + std::to_string(rank),
                           {.rank = rank,
                            .world_size = 2,
                            .store = c10::make_intrusive<c10d::PrefixStore>("rpc", store),
                            .transports = {"shm"}});
    for (ProcessGroup& group : groups) group.monitored_barrier(seconds(20));
    if (rank == 0)
      EXPECT_EQ(connections(), before + 4)
          << "for each rank one, and a second one that notices its end";
    for (ProcessGroup& group : groups) group.barrier().wait();
    agent.shutdown();
  });
  EXPECT_TRUE(comes_to(before)) << connections() << " are left of " << before;
}

// The program's own connection is another one: while the program waits on it, groups go on.
TEST_F(TcpStore, BlockedProgramDelaysNoGroup) {
  const std::vector<StorePointer> stores{client(), client()};
  harness::run_threads(2, [&](int rank) {
    const auto& store = stores[static_cast<std::size_t>(rank)];
    auto first = join(store, rank, "first");
    std::thread blocked([&] { store->wait({"released"}, seconds(50)); });
    auto later = first.new_group({0, 1});
    later.monitored_barrier(seconds(20));
    later.barrier().wait();
    if (rank == 0) static_cast<c10d::Store&>(*host_).set("released", std::string("yes"));
    blocked.join();
  });
}

// A group that waits for a rank leaves the connection to other groups.
TEST_F(TcpStore, WaitingGroupDelaysNoOther) {
  const StorePointer store = client(), other = client();
  harness::run_threads(2, [&](int rank) {
    auto group = join(rank == 0 ? store : other, rank, "group");
    std::thread waiting;
    if (rank == 0) {
      waiting = std::thread([&] {
        const Error error = harness::error_of([&] {
          static_cast<void>(
              init_process_group({.rank = 0,
                                  .world_size = 3,  // the other two ranks never come
                                  .store = c10::make_intrusive<c10d::PrefixStore>("never", store),
                                  .group_name = "never",
                                  .timeout = seconds(3),
                                  .device = c10::Device(c10::kCPU)}));
        });
        EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      });
    }
    for (int i = 0; i < 5; ++i) group.new_group({0, 1}).monitored_barrier(seconds(20));
    if (waiting.joinable()) waiting.join();
    group.barrier().wait();
  });
}

TEST_F(TcpStore, PrefixesShareTheStoresConnection) {
  const StorePointer store = client();
  const StorePointer outer = c10::make_intrusive<c10d::PrefixStore>(
      "outer/", c10::make_intrusive<c10d::PrefixStore>("inner", store));
  const auto shared = group::connection_of(outer), again = group::connection_of(outer),
             bare = group::connection_of(store);
  const auto innermost = [](const StorePointer& given) {
    auto* const prefix = dynamic_cast<c10d::PrefixStore*>(given.get());
    return prefix == nullptr ? given : prefix->getUnderlyingNonPrefixStore();
  };
  EXPECT_NE(innermost(shared), store);
  EXPECT_EQ(innermost(shared), innermost(again));
  EXPECT_EQ(bare, innermost(shared));
  EXPECT_EQ(innermost(group::connection_of(shared)), bare) << "a shared connection is its own";
  EXPECT_NE(innermost(group::connection_of(client())), bare)
      << "another store object has another connection";
  outer->set("key", std::string("value"));
  EXPECT_EQ(shared->get_to_str("key"), "value");
  shared->set("key", std::string("other"));
  EXPECT_EQ(outer->get_to_str("key"), "other");
  EXPECT_TRUE(bare->check({"inner/outer//key"}));
  const StorePointer without = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(group::connection_of(without), without);
}

// c10d would log a stack trace for each call.
TEST_F(TcpStore, LostHostIsNoticedBeforeC10dIsAsked) {
  group::StoreBootstrap store(group::connection_of(client()));
  store.set("key", group::to_bytes("value"));
  host_.reset();
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    const Error error = harness::error_of([&] { store.exists("key"); });
    EXPECT_EQ(error.blame(), Blame::PeerLost);
    EXPECT_NE(error.text().find("the process that hosts it has ended"), std::string::npos)
        << error.text();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(TcpStore, ConnectionEndsWithItsLastUser) {
  const StorePointer store = client();
  const std::size_t before = connections();
  for (int i = 0; i < 3; ++i) {
    const auto shared = group::connection_of(store);
    EXPECT_TRUE(comes_to(before + 2)) << "with the second one that notices its end";
  }
  EXPECT_TRUE(comes_to(before));
}

}  // namespace
}  // namespace weft
