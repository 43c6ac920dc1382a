// SPDX-License-Identifier: Apache-2.0
#include <barrier>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/types.h>

#include <weft/base/log.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/store/address.h>
#include <weft/group.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;
using std::chrono::milliseconds;
using std::chrono::seconds;
namespace fs = std::filesystem;

using Variables = std::map<std::string, std::string>;

group::Environment environment(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

Error refused(const group::RendezvousOptions& options, Variables variables = {},
              milliseconds limit = milliseconds(200)) {
  return error_of(
      [&] { group::rendezvous(options, environment(std::move(variables)), Deadline::in(limit)); });
}

void expect_text(const Error& error, Blame blame, const std::string& text) {
  EXPECT_EQ(error.blame(), blame) << error.what();
  EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
}

std::string address(int port) { return "tcp://127.0.0.1:" + std::to_string(port); }

// Each rank sets its element of a sum; expects the elements of all ranks.
void expect_whole(ProcessGroup& group, int size, int value = 1) {
  EXPECT_EQ(group.size(), size);
  const auto seen = torch::zeros({size}, at::kInt);
  seen[group.rank()] = value;
  group.all_reduce(seen).wait();
  EXPECT_TRUE(torch::equal(seen, torch::full({size}, value, at::kInt))) << seen;
}

// A folder with the path of a job's file.
struct Folder : harness::Folder {
  std::string file() const { return path() + "/job"; }
  std::string url() const { return "file://" + file(); }
};

// --- env://

TEST(Env, JoinsByTheLaunchersVariables) {
  Processes processes(3, [](int rank) {
    auto group = init_process_group();
    EXPECT_EQ(group.rank(), rank);
    expect_whole(group, 3);
  });
  processes.expect_success();
}

TEST(Env, NamesEveryMissingVariable) {
  expect_text(refused({}), Blame::Caller,
              "env:// needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT");
  expect_text(refused({}, {{"RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}}), Blame::Caller,
              "env:// needs WORLD_SIZE, MASTER_PORT");
  const Variables all{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (const auto& [name, value] : all) {
    Variables variables = all;
    variables.erase(name);
    expect_text(refused({}, variables), Blame::Caller,
                "env:// needs " + name + " in the environment");
  }
  expect_text(refused({.rank = 0, .world_size = 1}), Blame::Caller,
              "env:// needs MASTER_ADDR, MASTER_PORT");
}

TEST(Env, OptionsAndUrlOverrideVariables) {
  const Variables variables{{"RANK", "7"},
                            {"WORLD_SIZE", "9"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", std::to_string(launch::free_port())},
                            {"LOCAL_RANK", "3"}};
  const auto deadline = Deadline::in(seconds(20));
  const auto by_url = group::rendezvous({.init_method = "env://?rank=0&world_size=2"},
                                        environment(variables), deadline);
  EXPECT_EQ(by_url.rank, 0);
  EXPECT_EQ(by_url.world_size, 2);
  EXPECT_EQ(by_url.local_rank, 3);
  const auto by_option =
      group::rendezvous({.init_method = "env://?rank=5&world_size=6", .rank = 0, .world_size = 3},
                        environment(variables), deadline);
  EXPECT_EQ(by_option.rank, 0);
  EXPECT_EQ(by_option.world_size, 3);
}

TEST(Env, RefusesInvalidNumbers) {
  const Variables good{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  const auto with = [&](const std::string& name, const std::string& value) {
    Variables variables = good;
    variables[name] = value;
    return refused({}, variables);
  };
  expect_text(with("RANK", "one"), Blame::Caller, "RANK is 'one'");
  expect_text(with("RANK", "2"), Blame::Caller, "rank 2 is outside a world of 2");
  expect_text(with("WORLD_SIZE", "0"), Blame::Caller, "world size is 0");
  for (const char* port : {"70000", "0", "x"}) {
    expect_text(with("MASTER_PORT", port), Blame::Caller,
                "MASTER_PORT is '" + std::string(port) + "'; it takes a number from 1 to 65535");
  }
}

TEST(Env, KnowsMpirunsAndSrunsVariables) {
  const auto deadline = Deadline::in(seconds(20));
  for (const Variables& variables : {Variables{{"OMPI_COMM_WORLD_RANK", "0"},
                                               {"OMPI_COMM_WORLD_SIZE", "1"},
                                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                               {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                               {"PMIX_NAMESPACE", "a-test-of-weft"}},
                                     Variables{{"PMI_RANK", "0"},
                                               {"PMI_SIZE", "1"},
                                               {"MPI_LOCALNRANKS", "1"},
                                               {"PMI_JOBID", "another-test-of-weft"}},
                                     Variables{{"SLURM_PROCID", "0"},
                                               {"SLURM_NTASKS", "1"},
                                               {"SLURM_NNODES", "1"},
                                               {"SLURM_JOB_ID", "0-test-of-weft"}}}) {
    const auto place = group::rendezvous({}, environment(variables), deadline);
    EXPECT_EQ(place.rank, 0);
    EXPECT_EQ(place.world_size, 1);
  }
}

// For example an agent's and a group's: rank 0 still announces the first when the others are at the
// second.
TEST(Env, EachMeetingOfAJobHasItsOwnStore) {
  const std::string job = "meetings-of-weft-" + std::to_string(::getpid());
  Processes processes(2, [=](int rank) {
    const auto of_launcher = environment({{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                                          {"OMPI_COMM_WORLD_SIZE", "2"},
                                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                          {"PMIX_NAMESPACE", job}});
    std::vector<group::Rendezvous> kept;
    for (const char* name : {"", "", "another", ""}) {
      const auto deadline = Deadline::in(seconds(20));
      kept.push_back(group::rendezvous({.group_name = name}, of_launcher, deadline));
      auto& store = *kept.back().store;
      store.setTimeout(seconds(20));
      const auto key = [&](int of) {
        return "meeting" + std::to_string(kept.size()) + "/" + std::to_string(of);
      };
      if (rank == 0) std::this_thread::sleep_for(milliseconds(50));  // rank 1 comes first
      store.set(key(rank), std::vector<std::uint8_t>{1});
      EXPECT_EQ(store.get(key(1 - rank)).size(), 1U);
    }
    // The stores end with rank 0, so rank 0 leaves last.
    auto& last = *kept.back().store;
    if (rank == 1) last.set("has read all", std::vector<std::uint8_t>{1});
    if (rank == 0) last.get("has read all");
  });
  processes.expect_success();
}

// Otherwise ranks that had tried a different number of times would never meet.
TEST(Env, RetryMeetsInTheSamePlace) {
  const auto of_launcher =
      environment({{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "2"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                   {"PMIX_NAMESPACE", "tries-of-weft-" + std::to_string(::getpid())}});
  const auto why_not = [&] {
    const Deadline deadline = Deadline::in(milliseconds(10));
    return error_of([&] { group::rendezvous({}, of_launcher, deadline); });
  };
  const Error first = why_not();
  EXPECT_EQ(first.blame(), Blame::Timeout) << first.what();
  EXPECT_EQ(why_not().text(), first.text()) << "both name the same file";
}

TEST(Env, LaunchedRankIsKnownBeforeJoining) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
        "LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    ::unsetenv(name);
  }
  ::setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
  EXPECT_EQ(launched_rank(), 1);
  EXPECT_EQ(launched_world_size(), 3);
  EXPECT_EQ(launched_local_rank_or(-1), -1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0", 1);
  EXPECT_EQ(launched_local_rank(), 0);
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"})
    ::unsetenv(name);
  EXPECT_EQ(launched_rank_or(5), 5);
  EXPECT_EQ(launched_world_size_or(6), 6);
  EXPECT_EQ(launched_local_rank_or(7), 7);
  for (const auto& [call, variable] : {std::pair{&launched_rank, "RANK"},
                                       {&launched_world_size, "WORLD_SIZE"},
                                       {&launched_local_rank, "LOCAL_RANK"}}) {
    const auto error = error_of([&, ask = call] { static_cast<void>(ask()); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find(variable), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("_or(…)"), std::string::npos) << error.text();
  }
}

TEST(Env, RestartsAreWhatTheLauncherCounts) {
  for (const char* name : {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}) ::unsetenv(name);
  EXPECT_EQ(launched_restarts(), 0);
  for (const char* name : {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}) {
    ::setenv(name, "2", 1);
    EXPECT_EQ(launched_restarts(), 2);
    ::setenv(name, "two", 1);
    EXPECT_EQ(error_of([] { static_cast<void>(launched_restarts()); }).blame(), Blame::Caller);
    ::unsetenv(name);
  }
}

TEST(Env, MpirunOverMachinesNeedsAnAddress) {
  expect_text(refused({}, {{"OMPI_COMM_WORLD_RANK", "0"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
              Blame::Caller, "mpirun -x MASTER_ADDR");
}

// --- below torchrun, whose agent hosts the store

class AgentStore : public testing::Test {
 protected:
  // Returns the store in which the rank has joined.
  c10::intrusive_ptr<c10d::Store> join(int rank, int restarts, int agents = 1) {
    const auto variables = environment({{"RANK", std::to_string(rank)},
                                        {"WORLD_SIZE", "2"},
                                        {"GROUP_WORLD_SIZE", std::to_string(agents)},
                                        {"MASTER_ADDR", "127.0.0.1"},
                                        {"MASTER_PORT", std::to_string(hosted_->getPort())},
                                        {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                        {"TORCHELASTIC_RESTART_COUNT", std::to_string(restarts)}});
    return group::rendezvous({}, variables, Deadline::in(seconds(20))).store;
  }
  // Expects that each sees the other's key, and none of those that met there before.
  static void expect_to_meet(const c10::intrusive_ptr<c10d::Store>& one,
                             const c10::intrusive_ptr<c10d::Store>& other) {
    EXPECT_FALSE(one->check({"met"}));
    one->set("met", std::string("yes"));
    EXPECT_TRUE(other->check({"met"}));
  }

 private:
  const c10::intrusive_ptr<c10d::TCPStore> hosted_ = [] {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }();
};

TEST_F(AgentStore, RanksMeetAfterAnEarlyFailure) {
  join(0, /*restarts=*/0);
  const auto again = join(0, /*restarts=*/1);
  expect_to_meet(again, join(1, /*restarts=*/1));
  // Other nodes have joined or left, which is not a restart.
  const auto changed = join(0, /*restarts=*/1);
  expect_to_meet(changed, join(1, /*restarts=*/1));
}

TEST_F(AgentStore, AgentsMayCountRestartsDifferently) {
  const auto first = join(0, /*restarts=*/0, /*agents=*/2);
  expect_to_meet(first, join(1, /*restarts=*/0, /*agents=*/2));
  const auto again = join(0, /*restarts=*/0, /*agents=*/2);
  expect_to_meet(again, join(1, /*restarts=*/1, /*agents=*/2));
}

TEST_F(AgentStore, FirstStartHasPythonsKeys) {
  const auto store = join(0, /*restarts=*/0);
  const auto all = dynamic_cast<c10d::PrefixStore&>(*store).getUnderlyingNonPrefixStore();
  store->set("key", std::string("value"));
  EXPECT_TRUE(all->check({"default_pg/key"}));
}

// --- tcp://

TEST(Tcp, TakesRankAndSizeFromItsQuery) {
  const int port = launch::free_port();
  harness::run_threads(3, [&](int rank) {
    auto group = init_process_group(
        {.init_method = address(port) + "?rank=" + std::to_string(rank) + "&world_size=3",
         .timeout = seconds(30)});
    EXPECT_EQ(group.rank(), rank);
    expect_whole(group, 3);
  });
}

// /etc/hosts may map that name to a loopback address, which ranks on other machines cannot use.
TEST(Tcp, RankZeroPublishesNoLoopback) {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  const std::string host = name;
  if (group::outward_address().empty()) GTEST_SKIP() << "this machine has no network";
  if (host.starts_with("localhost") || !group::is_this_machine(host))
    GTEST_SKIP() << "the host name does not name this machine: " << host;
  const std::string url = "tcp://" + host + ":" + std::to_string(launch::free_port());
  const auto place = group::rendezvous({.init_method = url, .rank = 0, .world_size = 1},
                                       environment({}), Deadline::in(seconds(20)));
  EXPECT_FALSE(place.local_address.starts_with("127.") || place.local_address == "::1")
      << place.local_address;
  // Ranks on this machine reach it, too.
  const std::string other = "tcp://" + host + ":" + std::to_string(launch::free_port());
  harness::run_threads(2, [&](int rank) {
    auto group = init_process_group(
        {.init_method = other, .rank = rank, .world_size = 2, .timeout = std::chrono::seconds(30)});
    expect_whole(group, 2);
  });
}

TEST(Tcp, NamedGroupsShareAnAddress) {
  const int port = launch::free_port();
  Processes processes(4, [=](int process) {
    ProcessGroupOptions options;
    options.init_method = address(port);
    options.rank = process / 2;
    options.world_size = 2;
    options.group_name = process % 2 == 0 ? "even" : "odd";
    auto group = init_process_group(options);
    expect_whole(group, 2, /*value=*/process % 2 == 0 ? 5 : 7);
    group.barrier().wait();
    // The job that hosts the store ends last, because the other job uses the store too.
    auto all = init_process_group({.init_method = "env://", .group_name = "all"});
    all.barrier().wait();
  });
  processes.expect_success();
}

TEST(Tcp, AddressServesManyGroups) {
  const int port = launch::free_port();
  harness::run_threads(2, [&](int rank) {
    const ProcessGroupOptions options{
        .init_method = address(port), .rank = rank, .world_size = 2, .timeout = seconds(30)};
    auto lasting = init_process_group(options);
    for (int life = 1; life <= 3; ++life) {
      auto group = init_process_group(options);
      expect_whole(group, 2, life);
    }
    expect_whole(lasting, 2, 9);
  });
}

// Rank 0's store ends with each group: a faster rank must not take the last group's for the next
// one's.
TEST(Tcp, AddressMayBeReusedAtOnce) {
  const int port = launch::free_port();
  Processes processes(4, [=](int rank) {
    for (int life = 1; life <= 8; ++life) {
      const bool is_other = life % 3 == 0;
      auto group = init_process_group({.backend = "tcp",
                                       .init_method = address(port),
                                       .rank = rank,
                                       .world_size = 4,
                                       .group_name = is_other ? "other" : "",
                                       .timeout = seconds(30)});
      expect_whole(group, 4, life);
    }
  });
  processes.expect_success();
}

TEST(Tcp, TimeoutNamesRankZerosGroup) {
  const int port = launch::free_port();
  const auto options = [&](int rank, const std::string& group_name) {
    return group::RendezvousOptions{
        .init_method = address(port), .rank = rank, .world_size = 2, .group_name = group_name};
  };
  const auto host = group::rendezvous(options(0, "a"), environment({}), Deadline::in(seconds(30)));
  expect_text(refused(options(1, "b"), {}, seconds(2)), Blame::Timeout,
              "rank 0 has joined group 'a' there, this rank joins group 'b'");
  const auto workers =
      group::rendezvous(options(0, "rpc"), environment({}), Deadline::in(seconds(30)));
  expect_text(refused(options(1, ""), {}, seconds(2)), Blame::Timeout,
              "rank 0 has joined group 'a', the workers of rpc::init there, this rank joins the "
              "group without a name");
}

// Connections to `port` from this machine; closed ones stay in the kernel's table for a while.
int connections_to(int port) {
  std::ifstream table("/proc/net/tcp");
  std::string line;
  std::getline(table, line);  // the columns' names
  int found = 0;
  while (std::getline(table, line)) {
    std::string number, from, to;
    std::istringstream(line) >> number >> from >> to;
    found += std::stoi(to.substr(to.find(':') + 1), nullptr, 16) == port;
  }
  return found;
}

// A thousand ranks may be waiting for rank 0.
TEST(Tcp, WaitingUsesOneConnection) {
  const int port = launch::free_port();
  const auto options = [&](int rank) {
    return group::RendezvousOptions{.init_method = address(port), .rank = rank, .world_size = 2};
  };
  const auto host = group::rendezvous(options(0), environment({}), Deadline::in(seconds(30)));
  group::rendezvous(options(1), environment({}), Deadline::in(seconds(30)));
  // Long enough to connect on a crowded machine.
  expect_text(refused(options(1), {}, seconds(2)), Blame::Timeout,
              "rank 1 waits for rank 0 at " + address(port));
  EXPECT_LE(connections_to(port), 10);
}

TEST(Tcp, TakenPortIsNamed) {
  const Descriptor taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto any = group::socket_address("0.0.0.0", 0);
  ASSERT_EQ(::bind(taken.get(), any.get(), any.length), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  const int port = group::port_of(taken.get());
  expect_text(refused({.init_method = address(port), .rank = 0, .world_size = 2}), Blame::Caller,
              address(port));
}

TEST(Tcp, AbsentHostIsNamed) {
  const int port = launch::free_port();
  expect_text(refused({.init_method = address(port), .rank = 1, .world_size = 2}), Blame::Timeout,
              "rank 1 cannot reach the store of rank 0 at " + address(port));
}

// c10d itself would wait forever for an answer.
TEST(Tcp, ForeignListenerIsReported) {
  const Descriptor mute = group::open_listener(AF_INET, 0);
  const int port = group::port_of(mute.get());
  expect_text(refused({.init_method = address(port), .rank = 1, .world_size = 2}), Blame::Timeout,
              "rank 1 cannot reach the store of rank 0 at " + address(port) +
                  ": the listener at 127.0.0.1:" + std::to_string(port) +
                  " does not answer like the store of a job");
}

// A host name for which no name server is asked.
TEST(Tcp, UnknownHostIsNamed) {
  const Error error =
      error_of([] { group::wait_for_name("two words", Deadline::never(), milliseconds(0)); });
  expect_text(
      error, Blame::Caller,
      "the host of rank 0, 'two words' (MASTER_ADDR, or in the address given), has no address");
  for (const char* rank : {"0", "1"}) {
    const Variables variables{{"RANK", rank},
                              {"WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "two words"},
                              {"MASTER_PORT", "29500"}};
    expect_text(refused({}, variables), Blame::Caller, "'two words' (MASTER_ADDR");
  }
}

TEST(Tcp, RefusesIncompleteAddresses) {
  expect_text(refused({.init_method = "tcp://127.0.0.1", .rank = 0, .world_size = 1}),
              Blame::Caller, "needs a host and a port");
  expect_text(refused({.init_method = "tcp://:80", .rank = 0, .world_size = 1}), Blame::Caller,
              "needs a host and a port");
  expect_text(refused({.init_method = "tcp://127.0.0.1:80"}), Blame::Caller,
              "no rank for tcp://127.0.0.1:80");
  expect_text(refused({.init_method = "tcp://127.0.0.1:80", .rank = 0}), Blame::Caller,
              "no world size");
  expect_text(refused({.init_method = "ftp://127.0.0.1:80"}), Blame::Caller,
              "unknown scheme 'ftp'");
  expect_text(refused({.init_method = "tcp://127.0.0.1:80?world_size=1"}), Blame::Caller,
              "no rank for tcp://127.0.0.1:80");
  expect_text(refused({.init_method = "tcp://127.0.0.1:80?rank=0"}), Blame::Caller,
              "no world size");
  expect_text(refused({.init_method = "tcp://127.0.0.1:80?rank=0&world_size=0"}), Blame::Caller,
              "the world size is 0");
}

// The world size that rpc::init passes is not the program's.
TEST(Tcp, AWorkerOfAnOpenJobSaysNothingOfAWorldSize) {
  std::string line;
  const log::Capture capture([&](LogLevel, std::string_view text) { line = text; });
  const std::string url = address(launch::free_port());
  EXPECT_THROW(
      group::rendezvous({.init_method = url, .world_size = 1, .wait_reports = {milliseconds(100)}},
                        environment({}), Deadline::in(seconds(1)), /*open=*/true),
      Error);
  EXPECT_NE(line.find("a process without a rank has waited"), std::string::npos) << line;
  EXPECT_EQ(line.find("world size"), std::string::npos) << line;
}

TEST(Tcp, AbsentRanksAreNamed) {
  const int port = launch::free_port();
  harness::run_threads(2, [&](int rank) {
    const auto error = error_of([&] {
      init_process_group({.init_method = address(port),
                          .rank = rank,
                          .world_size = 4,
                          .timeout = milliseconds(rank == 0 ? 3'000 : 20'000)});
    });
    // Rank 0 gives up after its timeout; rank 1 when rank 0 or its store has gone.
    if (rank == 0) {
      expect_text(error, Blame::Timeout,
                  "ranks 2, 3 did not come within 3 s; all ranks must be started with the same "
                  "address and world size; this one is rank 0 of 4");
    } else {
      EXPECT_TRUE(error.blame() == Blame::PeerLost || error.blame() == Blame::Timeout)
          << error.what();
    }
  });
}

TEST(Tcp, DifferentWorldSizesAreRefused) {
  const int port = launch::free_port();
  harness::run_threads(2, [&](int rank) {
    const auto error = error_of([&] {
      init_process_group({.init_method = address(port),
                          .rank = rank,
                          .world_size = 2 + rank,
                          .timeout = seconds(20)});
    });
    if (rank == 1) {
      expect_text(error, Blame::Caller, "rank 0 gives the world size 2, rank 1 gives 3");
    } else {
      expect_text(error, Blame::PeerLost, "rank 1");
    }
  });
}

// --- file://

TEST(File, RanksFollowTheOrderOfArrival) {
  const Folder folder;
  const std::string url = folder.url();
  Processes processes(4, [=](int) {
    ::unsetenv("RANK");
    auto group = init_process_group({.init_method = url + "?world_size=4", .timeout = seconds(30)});
    expect_whole(group, 4);
  });
  processes.expect_success();
  EXPECT_FALSE(fs::exists(folder.file())) << "the last rank to leave removes it";
}

TEST(File, KeepsGivenRanks) {
  const Folder folder;
  const std::string url = folder.url();
  Processes processes(3, [=](int rank) {
    auto group = init_process_group(
        {.init_method = url, .rank = 2 - rank, .world_size = 3, .timeout = seconds(30)});
    EXPECT_EQ(group.rank(), 2 - rank);
    expect_whole(group, 3);
  });
  processes.expect_success();
}

TEST(File, ThreadsMayBeRanks) {
  const Folder folder;
  harness::run_threads(3, [&](int) {
    auto group =
        init_process_group({.init_method = folder.url(), .world_size = 3, .timeout = seconds(30)});
    expect_whole(group, 3);
  });
}

TEST(File, ServesOneJobAfterAnother) {
  const Folder folder;
  for (int job = 1; job <= 2; ++job) {
    harness::run_threads(2, [&](int) {
      auto group = init_process_group(
          {.init_method = folder.url(), .world_size = 2, .timeout = seconds(30)});
      expect_whole(group, 2, job);
    });
    EXPECT_FALSE(fs::exists(folder.file()));
  }
}

// The stores alone, without Gloo or a group; they end at the same instant.
TEST(File, IsRemovedHoweverTheLastRanksLeave) {
  const Folder folder;
  for (int job = 1; job <= 300; ++job) {
    std::barrier together(3);
    harness::run_threads(3, [&](int rank) {
      auto place = group::rendezvous({.init_method = folder.url(), .rank = rank, .world_size = 3},
                                     environment({}), Deadline::in(seconds(20)));
      together.arrive_and_wait();
      place.store.reset();
    });
    ASSERT_FALSE(fs::exists(folder.file())) << "after job " << job;
  }
}

TEST(File, StaysWhileARankNeedsIt) {
  const Folder folder;
  const auto come = [&](int rank) {
    return group::rendezvous({.init_method = folder.url(), .rank = rank, .world_size = 2},
                             environment({}), Deadline::in(seconds(20)))
        .store;
  };
  come(0).reset();
  EXPECT_TRUE(fs::exists(folder.file())) << "rank 1 has not come";
  auto of_group = come(1);
  auto of_agent = come(1);
  of_group.reset();
  EXPECT_TRUE(fs::exists(folder.file())) << "rank 1 has it open";
  of_agent.reset();
  EXPECT_FALSE(fs::exists(folder.file()));
}

TEST(File, MissingKeyWaitsForTheGroupsLimit) {
  const Folder folder;
  auto group = init_process_group({.init_method = folder.url(),
                                   .rank = 0,
                                   .world_size = 1,
                                   .timeout = std::chrono::milliseconds(300)});
  EXPECT_EQ(group.store()->getTimeout(), std::chrono::milliseconds(300))
      << "not only the time that joining has left of it";
  EXPECT_ANY_THROW(group.store()->get("missing"));
  group.store()->set("there", std::string("yes"));
  EXPECT_EQ(group.store()->get("there").size(), 3U) << "the store still works";
}

TEST(File, LeftoverOfAKilledJobIsReported) {
  const Folder folder;
  // A job of two whose processes have ended without leaving.
  {
    Processes killed(2, [url = folder.url()](int) {
      ::unsetenv("RANK");
      auto group =
          init_process_group({.init_method = url, .world_size = 2, .timeout = seconds(30)});
      Processes::say("joined");
      for (;;) ::pause();
    });
    for (int rank = 0; rank < 2; ++rank) killed.wait_for(rank, "joined");
  }
  expect_text(refused({.init_method = folder.url(), .world_size = 2}), Blame::Caller,
              "more processes came than the world size 2; or an earlier job that was killed left "
              "the file: remove it");
  expect_text(refused({.init_method = folder.url(), .rank = 1, .world_size = 2}), Blame::Caller,
              "rank 1 came twice");
}

TEST(File, RefusesUnusablePaths) {
  expect_text(refused({.init_method = "file:///no/such/folder/job", .world_size = 2}),
              Blame::Caller, "the folder /no/such/folder/ cannot be written to");
  expect_text(refused({.init_method = "file:///tmp/weft-job"}), Blame::Caller, "no world size");
  expect_text(refused({.init_method = "file://", .world_size = 2}), Blame::Caller, "needs a path");
  expect_text(refused({.init_method = "file://?rank=0&world_size=1"}), Blame::Caller,
              "needs a path");
  expect_text(refused({.init_method = "file:///tmp/weft-job", .rank = 2, .world_size = 2}),
              Blame::Caller, "outside a world of 2");
}

// --- a store that the program gives

TEST(GivenStore, MayBeOfAnyKind) {
  const auto tcp = [port = launch::free_port()](int rank) -> c10::intrusive_ptr<c10d::Store> {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.isServer = rank == 0;
    options.numWorkers = 2;
    options.timeout = seconds(20);
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  };
  harness::run_threads(2, [&](int rank) {
    auto group = init_process_group(
        {.rank = rank, .world_size = 2, .store = tcp(rank), .timeout = seconds(30)});
    expect_whole(group, 2);
  });
  const Folder folder;
  harness::run_threads(2, [&](int rank) {
    auto group =
        init_process_group({.rank = rank,
                            .world_size = 2,
                            .store = c10::make_intrusive<c10d::FileStore>(folder.file(), 2),
                            .timeout = seconds(30)});
    expect_whole(group, 2);
  });
}

// The group finds the store's connection through any number of prefixes, and uses one of its own
// while a user blocks on theirs.
TEST(GivenStore, MayHaveSeveralPrefixes) {
  const int port = launch::free_port();
  harness::run_threads(2, [&](int rank) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.isServer = rank == 0;
    options.numWorkers = 2;
    options.timeout = seconds(20);
    const auto base = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const auto inner = c10::make_intrusive<c10d::PrefixStore>("inner", base);
    const auto store = c10::make_intrusive<c10d::PrefixStore>("outer", inner);
    auto group =
        init_process_group({.rank = rank, .world_size = 2, .store = store, .timeout = seconds(30)});
    std::thread user([&] {
      if (rank == 1) group.store()->wait({"late"}, seconds(20));
    });
    expect_whole(group, 2);
    group.monitored_barrier(seconds(20));
    auto pair = group.new_group({0, 1});
    expect_whole(pair, 2);
    if (rank == 0) group.store()->set("late", std::string("now"));
    user.join();
    EXPECT_EQ(base->get("inner/outer/0//late").size(), 3U);
    group.barrier().wait();
  });
}

TEST(GivenStore, AbsentRankZeroIsNamed) {
  for (const char* backend : {"gloo", "tcp"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(2, [&](int thread) {
      const Error error = error_of([&] {
        init_process_group({.backend = backend,
                            .rank = thread + 1,
                            .world_size = 3,
                            .store = store,
                            .timeout = seconds(2),
                            .device = c10::Device(c10::kCPU)});
      });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("rank 0 did not come within 2 s"), std::string::npos)
          << error.text();
    });
  }
}

TEST(GivenStore, ServesOneGroupAfterAnother) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(2, [&](int rank) {
    const auto join = [&](const std::string& name) {
      return init_process_group({.rank = rank,
                                 .world_size = 2,
                                 .store = store,
                                 .group_name = name,
                                 .timeout = seconds(30)});
    };
    auto group = join("first");
    expect_whole(group, 2);
    auto used = group.new_group({0, 1}), unused = group.new_group({0, 1}),
         own = group.new_group({0});
    expect_whole(used, 2);
    for (ProcessGroup* one : {&group, &own, &unused, &used}) *one = ProcessGroup();
    expect_text(error_of([&] { static_cast<void>(group.barrier()); }), Blame::Caller,
                "this process group is empty");
    group = join("second");
    harness::meet(group);
    if (rank == 0) group.abort("over");
    EXPECT_EQ(error_of([&] { group.all_reduce(torch::ones({1})).wait(); }).blame(),
              Blame::Cancelled);
    for (const char* name : {"third", "second"}) {
      group = join(name);
      expect_whole(group, 2);
      group = ProcessGroup();
    }
  });
}

TEST(GivenStore, ServesSeveralGroupsByName) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(4, [&](int thread) {
    auto group = init_process_group({.rank = thread / 2,
                                     .world_size = 2,
                                     .store = store,
                                     .group_name = thread % 2 == 0 ? "even" : "odd",
                                     .timeout = seconds(30)});
    expect_whole(group, 2, thread % 2 + 1);
  });
}

TEST(GivenStore, NeedsExplicitRankAndWorldSize) {
  const Variables variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  expect_text(refused({.store = store}, variables), Blame::Caller, "no rank for a given store");
  expect_text(refused({.rank = 0, .store = store}, variables), Blame::Caller,
              "no world size for a given store");
}

}  // namespace
}  // namespace weft
