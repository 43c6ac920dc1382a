// SPDX-License-Identifier: Apache-2.0
// Plants faults among real ranks, each in its own process, and expects that the analysis of their
// flight recorders names them.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/autograd.h>
#include <weft/group.h>
#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/rpc.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Processes;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::Finding;
using What = Finding::What;
using namespace std::chrono_literals;

[[noreturn]] void stay() {
  for (;;) ::pause();
}

int hang() { stay(); }

class PlantedFaults : public testing::Test {
 protected:
  // Sets the variable before anything reads it; the ranks, which are forked, inherit it.
  PlantedFaults() { ::setenv("WEFT_DUMP_DIR", folder_.c_str(), 1); }

  static ProcessGroup join(const std::string& backend = "tcp") {
    ProcessGroupOptions options;
    options.backend = backend;
    options.device = c10::Device(c10::kCPU);
    return init_process_group(options);
  }

  // Asks that rank for a dump, and blocks until there is one.
  void ask(Processes& ranks, int rank) {
    const auto before = dumps_of(ranks.process(rank));
    ranks.signal(rank, SIGUSR1);
    while (dumps_of(ranks.process(rank)) == before)
      std::this_thread::yield();  // ctest's timeout limits it
  }

  std::size_t dumps_of(pid_t process) const {
    const std::string start = "dump-" + std::to_string(process) + "-";
    std::size_t count = 0;
    for (const std::string& file : files())
      count += std::filesystem::path(file).filename().string().starts_with(start) ? 1 : 0;
    return count;
  }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().extension() == ".json") names.push_back(entry.path().string());
    }
    return names;
  }

  std::vector<Finding> findings(What what,
                                std::chrono::nanoseconds older_than = tools::kOlderThan) const {
    std::vector<Finding> found;
    for (const Finding& one : tools::analyze(tools::read_dumps(files()), older_than)) {
      std::printf("%s: %s\n", name(one.what), one.text.c_str());
      if (one.what == what) found.push_back(one);
    }
    return found;
  }

  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
};

TEST_F(PlantedFaults, LateRankAndItsCollectiveAreNamed) {
  Processes ranks(3, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    group.all_reduce(tensor).wait();
    if (rank != 2) {
      Work second = group.all_reduce(tensor);
      EXPECT_EQ(harness::error_of([&] { second.synchronize(200ms); }).blame(), Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u) << "a timeout must write a dump";
  ask(ranks, 2);
  const auto late = findings(What::LateRank, 0ns);  // the timeout was short
  ASSERT_EQ(late.size(), 1u);
  EXPECT_THAT(late[0].ranks, ElementsAre(2));
  EXPECT_THAT(late[0].text, HasSubstr("it has not come to collective #2, all_reduce (Sum) of "
                                      "float32 [4] in group 'default', where ranks 0, 1 wait"));
  const auto dumps = tools::read_dumps(files()).dumps;
  for (const auto& dump : dumps) {
    EXPECT_EQ(dump.jobs.size(), 1u);
    EXPECT_EQ(dump.jobs, dumps.front().jobs);
  }
}

TEST_F(PlantedFaults, RankMissingABarrierIsNamed) {
  Processes ranks(3, [](int rank) {
    auto group = join();
    if (rank != 2) {
      EXPECT_EQ(harness::error_of([&] { group.monitored_barrier(300ms); }).blame(), Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_GE(dumps_of(ranks.process(rank)), 1u) << "a timeout must write a dump";
  ask(ranks, 2);
  const auto late = findings(What::LateRank);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_THAT(late[0].ranks, ElementsAre(2));
  EXPECT_THAT(
      late[0].text,
      HasSubstr(
          "it has not come to monitored_barrier #1 in group 'default', where ranks 0, 1 wait"));
}

TEST_F(PlantedFaults, MismatchedCollectivesAreNamed) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    Work work = rank == 0 ? group.all_reduce(tensor) : group.broadcast(tensor, 0);
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) {
    ranks.wait_for(rank, "there");
    ask(ranks, rank);
  }
  const auto found = findings(What::Mismatch);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(found[0].text, HasSubstr("rank 0 calls all_reduce (Sum) of float32 [4], 16 bytes"));
  EXPECT_THAT(found[0].text, HasSubstr("rank 1 calls broadcast (root 0) of float32 [4], 16 bytes"));
}

TEST_F(PlantedFaults, DifferingRootsAndOpsAreNamed) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    auto other = group.new_group({0, 1});
    // Each rank names itself as the root, and in the other group each uses another reduction.
    Work first = group.broadcast(tensor, rank);
    Work second = other.reduce(tensor, 1, rank == 0 ? ReduceOp::Sum : ReduceOp::Max);
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) {
    ranks.wait_for(rank, "there");
    ask(ranks, rank);
  }
  const auto found = findings(What::Mismatch);
  ASSERT_EQ(found.size(), 2u) << "the first mismatch of each group";
  EXPECT_THAT(
      found[0].text,
      HasSubstr("rank 0 calls broadcast (root 0) of float32 [4], 16 bytes, and rank 1 calls "
                "broadcast (root 1) of float32 [4], 16 bytes"));
  EXPECT_THAT(found[1].text, HasSubstr("calls reduce (Max, root 1) of float32 [4]"));
  EXPECT_THAT(found[1].text, HasSubstr("calls reduce (Sum, root 1) of float32 [4]"));
}

TEST_F(PlantedFaults, LostRankIsNamed) {
  Processes ranks(3, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    group.all_reduce(tensor).wait();
    Processes::say("there");
    if (rank == 1) stay();
    // The rank may hear of the loss before it calls this.
    EXPECT_EQ(harness::error_of([&] { group.all_reduce(tensor).wait(); }).blame(), Blame::PeerLost);
    Processes::say("lost it");
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  ranks.signal(1, SIGKILL);
  for (const int rank : {0, 2}) {
    ranks.wait_for(rank, "lost it");
    EXPECT_GE(dumps_of(ranks.process(rank)), 1u);
  }
  const auto missing = findings(What::MissingRank);
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_THAT(missing[0].ranks, ElementsAre(1));
}

// Rank 0 waits for rank 2, which lives: nothing but the news of the loss ends its wait, and its
// dump is written when the news comes.
TEST_F(PlantedFaults, DumpUponNewsOfALossShowsTheWaitThatItEnds) {
  Processes ranks(3, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    Work work = rank == 0 ? group.recv(tensor, 2) : Work();
    Processes::say("there");
    if (rank == 0) {
      EXPECT_EQ(harness::error_of([&] { work.wait(); }).blame(), Blame::PeerLost);
      Processes::say("lost it");
    }
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  ranks.signal(1, SIGKILL);
  ranks.wait_for(0, "lost it");
  const auto failed = findings(What::Failure);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_THAT(failed[0].text, HasSubstr("recv #1 from rank 2"));
  EXPECT_THAT(failed[0].text, HasSubstr("PeerLost: rank 1 is lost"));
}

TEST_F(PlantedFaults, CycleOfReceivesIsNamed) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    Work work = group.recv(tensor, 1 - rank, /*tag=*/3);
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  for (int rank = 0; rank < 2; ++rank) ask(ranks, rank);
  // They have waited only for a moment, so waits of any age count.
  const auto found = findings(What::CycleOfWaits, 0ns);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(
      found[0].text,
      HasSubstr(
          "rank 0 for rank 1 in recv #1 from rank 1 with tag 3 of float32 [4] in group 'default'"));
}

TEST_F(PlantedFaults, UnsentMessageAndSenderAreNamed) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    group.all_reduce(tensor).wait();
    if (rank == 0) {
      Work work = group.recv(tensor, 1);
      EXPECT_EQ(harness::error_of([&] { work.synchronize(200ms); }).blame(), Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u) << "a timeout must write a dump";
  ask(ranks, 1);
  const auto found = findings(What::StuckMessage, 0ns);  // the timeout was short
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(
      found[0].text,
      HasSubstr("in recv #1 from rank 1 of float32 [4] in group 'default', which rank 1 has not "
                "sent; it is in no operation: its last, collective #1, all_reduce"));
}

TEST_F(PlantedFaults, HangingCallIsLocated) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      EXPECT_EQ(
          harness::error_of([&] { agent.sync<&hang>(rpc::to("worker1").timeout(300ms)); }).blame(),
          Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u);
  ask(ranks, 1);
  const auto found = findings(What::NoReply, 0ns);  // the timeout was short
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("for a reply to the call of"));
  EXPECT_THAT(found[0].text, HasSubstr("hang on rank 1: it has run there for"));
}

TEST_F(PlantedFaults, CycleOfCallsIsNamed) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    const auto call = agent.async<&hang>(1 - rank);
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  for (int rank = 0; rank < 2; ++rank) ask(ranks, rank);
  const auto found = findings(What::CycleOfWaits, 0ns);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(found[0].text, HasSubstr("rank 0 for rank 1 in the call of"));
  EXPECT_THAT(found[0].text, HasSubstr("hang on rank 1; rank 1 for rank 0 in the call of"));
}

// Rank 1 joins each collective 20 ms late: the delay is the planted fault.
TEST_F(PlantedFaults, StragglerIsNamed) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    for (int i = 0; i < 15; ++i) {
      if (rank == 1) std::this_thread::sleep_for(20ms);
      group.all_reduce(tensor).wait();
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  for (int rank = 0; rank < 2; ++rank) ask(ranks, rank);
  const auto slow = findings(What::SlowRank);
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_THAT(slow[0].ranks, ElementsAre(1));
  EXPECT_THAT(slow[0].text, HasSubstr("collectives of group 'default'"));
}

at::Tensor hangs_backwards(const at::Tensor& x) {
  const at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor& gradient) {
    stay();
    return gradient;
  });
  return y;
}

TEST_F(PlantedFaults, StuckBackwardIsLocated) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    agent.set_timeout(2s);  // for the backward; the workers may need longer to start
    if (rank == 0) {
      AutogradContext context(agent);
      const at::Tensor loss = agent
                                  .sync<&hangs_backwards>(rpc::to("worker1").timeout(60s),
                                                          torch::ones({4}, torch::requires_grad()))
                                  .sum();
      EXPECT_EQ(harness::error_of([&] { context.backward({loss}); }).blame(), Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  ranks.wait_for(1, "there");
  ranks.wait_for(0, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u);
  ask(ranks, 1);
  const auto stuck = findings(What::StuckBackward, 0ns);
  ASSERT_EQ(stuck.size(), 1u);
  EXPECT_THAT(stuck[0].ranks, ElementsAre(1));
}

at::Tensor times_two(at::Tensor x) { return x * 2; }

// The pass is stuck at its root only, and none of its calls fails.
TEST_F(PlantedFaults, BackwardWithUnusedResultIsNamed) {
  Processes ranks(3, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    agent.set_timeout(1s);  // for the backward; the workers may need longer to start
    if (rank == 0) {
      AutogradContext context(agent);
      const auto x = torch::ones({4}, torch::requires_grad());
      const auto unused = agent.sync<&times_two>("worker2", x);
      const auto loss = agent.sync<&times_two>("worker1", x).sum();
      EXPECT_EQ(harness::error_of([&] { context.backward({loss}); }).blame(), Blame::Timeout);
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u);
  const auto stuck = findings(What::StuckBackward, 0ns);
  ASSERT_EQ(stuck.size(), 1u);
  EXPECT_THAT(stuck[0].text, HasSubstr("rank 0 "));
}

int vanish() { ::_exit(0); }

// The next dump is written a second later at the earliest, so the first one must contain the
// failure.
TEST_F(PlantedFaults, LostWorkerIsNamedByItsCall) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      const auto waits = agent.async<&hang>("worker1");
      EXPECT_EQ(harness::error_of([&] { agent.sync<&vanish>("worker1"); }).blame(),
                Blame::PeerLost);
      EXPECT_EQ(harness::error_of([&] { waits.get(); }).blame(), Blame::PeerLost);
    }
    Processes::say("there");
    stay();
  });
  ranks.wait_for(0, "there");
  EXPECT_EQ(dumps_of(ranks.process(0)), 1u);
  const auto failed = findings(What::Failure);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_THAT(failed[0].text, HasSubstr("on rank 1: PeerLost"));
}

int answer() { return 42; }

class Sleeper {
 public:
  Sleeper() { stay(); }
  int value() const { return 0; }
};

TEST_F(PlantedFaults, RRefWithoutAValueIsNamed) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      const RRef<Sleeper> reference = agent.remote<Sleeper>("worker1");
      EXPECT_EQ(
          harness::error_of([&] { reference.timeout(300ms).sync<&Sleeper::value>(); }).blame(),
          Blame::Timeout);
      Processes::say("there");
      stay();
    }
    Processes::say("there");
    stay();
  });
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "there");
  EXPECT_GE(dumps_of(ranks.process(0)), 1u);
  ask(ranks, 1);
  const auto found = findings(What::NoReply, 0ns);
  ASSERT_GE(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("on rank 1: it has run there for"));
}

// The ranks are in a message, a call, a collective and in shutdown(), none of them for long, as in
// a job that runs.
TEST_F(PlantedFaults, HealthyJobIsNotAccused) {
  Processes ranks(3, [](int rank) {
    auto group = join();
    at::Tensor tensor = torch::ones({4});
    group.all_reduce(tensor).wait();
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      EXPECT_EQ(agent.sync<&answer>("worker1"), 42);
    }
    Work late = rank == 0 ? group.recv(tensor, 1) : Work();
    Processes::say("there");
    if (rank == 2) agent.shutdown();  // waits for the others
    stay();
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "there");
  for (int rank = 0; rank < 3; ++rank) ask(ranks, rank);
  const tools::Dumps dumps = tools::read_dumps(files());
  for (const Finding& one : tools::analyze(dumps, 10min))
    ADD_FAILURE() << name(one.what) << ": " << one.text;
  EXPECT_FALSE(tools::remarks(dumps, 10min).running.empty());
  for (const Finding& one : tools::analyze(dumps, 0ns))
    EXPECT_EQ(one.text.find("join_shutdown"), std::string::npos);
}

// The program asks for the same dump.
TEST_F(PlantedFaults, GroupAndAgentGiveTheirDumps) {
  Processes ranks(1, [&](int) {
    auto group = join();
    group.barrier().wait();
    rpc::Agent agent = rpc::init("worker0");
    std::ofstream(folder_ + "/group.json") << group.dump();
    std::ofstream(folder_ + "/agent.json") << agent.dump();
  });
  ranks.expect_success();
  const auto dumps = tools::read_dumps({folder_ + "/group.json"});
  ASSERT_EQ(dumps.groups.size(), 1u);
  EXPECT_EQ(dumps.groups[0].views.at(0).records.at(0).name, "barrier");
  EXPECT_EQ(tools::read_dumps({folder_ + "/agent.json"}).agents.size(), 1u);
}

}  // namespace
}  // namespace weft
