// SPDX-License-Identifier: Apache-2.0
// A rank that waits for another reports it, once a job, and names that rank. Here it does so after
// a fraction of a second; the late ranks come when the line has been written.
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <weft/base/log.h>
#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/ddp/ddp.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/zero/zero.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using namespace std::chrono_literals;
using group::decode_wait_answer;
using group::decode_wait_call;
using group::WaitAnswer;
using group::WaitCall;
using harness::error_of;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

// While it lives, collects this process's log lines about waiting and about unreceived messages.
class WaitLog {
 public:
  WaitLog() : capture_([this](LogLevel level, std::string_view line) { note(level, line); }) {}

  // Blocks until there are `lines` lines; fails the test if they do not appear.
  void await(std::size_t lines) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 30s, [&] { return lines_.size() >= lines; }))
      ADD_FAILURE() << "no rank reported that it waits";
  }
  std::vector<std::string> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  void note(LogLevel level, std::string_view line) {
    if (level > LogLevel::Warn) return;
    // On a slow machine, an operation to which all ranks have come takes as long.
    if (line.find("and it is under way") != std::string_view::npos) return;
    {
      std::lock_guard lock(mutex_);
      for (const char* words : {"has waited", "has never received"}) {
        if (line.find(words) != std::string_view::npos) lines_.emplace_back(line);
      }
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;
  log::Capture capture_;
};

const WaitReports kOnce{100ms};

// Runs ranks as threads. The body of each makes its group by join(rank, …).
void on_ranks(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class WaitsOver : public testing::TestWithParam<const char*> {
 protected:
  ProcessGroup join(int rank, int ranks, WaitReports reports = kOnce,
                    std::chrono::milliseconds timeout = 60s) {
    return init_process_group({.backend = GetParam(),
                               .rank = rank,
                               .world_size = ranks,
                               .store = store_,
                               .timeout = timeout,
                               .device = at::kCPU,
                               .wait_reports = std::move(reports)});
  }

  WaitLog log_;
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

INSTANTIATE_TEST_SUITE_P(Over, WaitsOver, testing::Values("gloo", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(WaitsOver, CollectiveNamesTheLateRankOnce) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    const auto tensor = torch::ones({2});
    group.all_reduce(tensor).wait();
    if (rank == 2) log_.await(1);
    group.all_reduce(tensor).wait();
    harness::meet(group);
  });
  EXPECT_THAT(
      log_.lines(),
      ElementsAre(
          AllOf(ContainsRegex(
                    "rank 0 has waited [0-9.]+ m?s in all_reduce #2 on group 'default': rank 2 has "
                    "not come; last seen in #1 \\(all_reduce, [0-9.]+ m?s ago\\)"),
                Not(HasSubstr("rank 1")), HasSubstr("SIGUSR1"), HasSubstr("WEFT_DEBUG=detail"))));
}

// Calls in which each of two ranks only receives, or which the backend does not compare: without
// the check, none would ever end.
TEST_P(WaitsOver, DifferentCallsAreRefused) {
  using Call = std::function<Work(ProcessGroup&, int rank)>;
  struct Pair {
    Call call;
    const char *first, *second;  // the calls of rank 0 and rank 1
  };
  const Pair pairs[] = {
      {[](ProcessGroup& group, int rank) {
         const auto tensor = torch::ones({2});
         return rank == 0 ? group.gather({torch::zeros({2}), torch::zeros({2})}, tensor, 0)
                          : group.scatter(tensor, {}, 0);
       },
       "gather of 2 elements of float32 to rank 0", "scatter of 2 elements of float32 from rank 0"},
      {[](ProcessGroup& group, int rank) { return group.broadcast(torch::ones({2}), 1 - rank); },
       "broadcast of 2 elements of float32 from rank 1",
       "broadcast of 2 elements of float32 from rank 0"},
      {[](ProcessGroup& group, int rank) { return group.reduce(torch::ones({2}), rank); },
       "reduce of 2 elements of float32 with Sum to rank 0",
       "reduce of 2 elements of float32 with Sum to rank 1"},
      {[](ProcessGroup& group, int rank) {
         return rank == 0 ? group.all_reduce(torch::ones({2})) : group.barrier();
       },
       "all_reduce of 2 elements of float32 with Sum", "barrier"},
  };
  for (const Pair& pair : pairs) {
    // Gloo's reduce ends on one of the ranks.
    if (GetParam() == std::string("gloo") && std::string_view(pair.first).starts_with("reduce"))
      continue;
    const std::string name = std::string(pair.first) + "/" + pair.second;
    on_ranks(2, [&](int rank) {
      auto group =
          init_process_group({.backend = GetParam(),
                              .rank = rank,
                              .world_size = 2,
                              .store = c10::make_intrusive<c10d::PrefixStore>(name, store_),
                              .device = at::kCPU,
                              .wait_reports = {10s}});
      const Error refused = error_of([&] { pair.call(group, rank).wait(); });
      EXPECT_EQ(refused.blame(), Blame::Caller) << refused.text();
      EXPECT_THAT(refused.text(), AllOf(HasSubstr("as operation "),
                                        HasSubstr("rank 0 called " + std::string(pair.first)),
                                        HasSubstr("rank 1 called " + std::string(pair.second))));
    });
  }
  EXPECT_THAT(log_.lines(), IsEmpty());
}

// The last rank to come finds the mismatch. Rank 2, which waits for rank 0 alone, hears of it.
TEST_P(WaitsOver, AnyLastRankFindsDifferentCalls) {
  for (int last = 0; last < 3; ++last) {
    const std::string name = std::to_string(last);
    on_ranks(3, [&](int rank) {
      auto group =
          init_process_group({.backend = GetParam(),
                              .rank = rank,
                              .world_size = 3,
                              .store = c10::make_intrusive<c10d::PrefixStore>(name, store_),
                              .device = at::kCPU,
                              .wait_reports = {300ms}});
      const auto key = "waits/" + std::to_string(rank);
      if (rank == last) store_->wait({name + "/waits/" + std::to_string((last + 1) % 3)}, 30s);
      const Error refused = error_of([&] {
        Work work = group.broadcast(torch::ones({2}), rank == 0 ? 1 : 0);
        std::this_thread::sleep_for(
            rank == last ? 0ms : 60ms);  // the others tell rank 0, which has not come
        store_->set(name + "/" + key, "");
        work.wait();
      });
      EXPECT_EQ(refused.blame(), Blame::Caller) << refused.text();
      EXPECT_THAT(refused.text(),
                  HasSubstr("rank 0 called broadcast of 2 elements of float32 from rank 1"));
    });
  }
}

TEST_P(WaitsOver, LongerWaitIsReportedAgain) {
  on_ranks(2, [&](int rank) {
    // Far apart: a look that comes late for both makes one report.
    auto group = join(rank, 2, {100ms, 1s});
    if (rank == 1) log_.await(2);
    group.barrier().wait();
  });
  EXPECT_THAT(log_.lines(), ElementsAre(HasSubstr("barrier #1"), HasSubstr("barrier #1")));
}

TEST_P(WaitsOver, LowestWaitingRankReports) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3, {1s});
    // Rank 1 waits first.
    if (rank == 0) store_->wait({"rank 1 waits"}, 30s);
    if (rank == 2) log_.await(1);
    auto work = group.all_reduce(torch::ones({2}));
    if (rank == 1) store_->set("rank 1 waits", "");
    work.wait();
  });
  EXPECT_THAT(log_.lines(), ElementsAre(StartsWith("rank 0 has waited")));
}

TEST_P(WaitsOver, ReceiveNamesTheAbsentSender) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    if (rank == 0) {
      group.recv(torch::zeros({2}), 1).wait();
    } else {
      log_.await(1);
      group.send(torch::ones({2}), 0).wait();
    }
    harness::meet(group);
  });
  EXPECT_THAT(
      log_.lines(),
      ElementsAre(AllOf(StartsWith("rank 0 has waited"), HasSubstr("recv from rank 1"),
                        HasSubstr("rank 1 has not taken part; last seen in no operation"))));
}

TEST_P(WaitsOver, MessageFollowsTheLastCollective) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    group.barrier().wait();
    if (rank == 0) {
      Work second = group.recv(torch::zeros({2}), 1, 2);
      second.wait();
      group.recv(torch::zeros({2}), 1, 1).wait();
    } else {
      Work first = group.send(torch::ones({2}), 0, 1);
      log_.await(1);
      group.send(torch::ones({2}), 0, 2).wait();
      first.wait();
    }
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(
                  HasSubstr("recv from rank 1"), HasSubstr("rank 1 has not sent all bytes"),
                  ContainsRegex(
                      "last seen in send to rank 0 \\(after collective #1, [0-9.]+ m?s ago\\)"))));
}

TEST_P(WaitsOver, WaitingForListsPendingOperations) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3, {});
    EXPECT_THAT(group.waiting_for(), IsEmpty());
    const auto tensor = torch::ones({2});
    group.all_reduce(tensor).wait();
    if (rank == 0) {
      Work sum = group.all_reduce(tensor);
      Work message = group.recv(torch::zeros({2}), 2);
      EXPECT_THAT(
          group.waiting_for(),
          ElementsAre(
              StartsWith("all_reduce #2: rank 1 has not come; last seen in #1 (all_reduce, "),
              StartsWith("all_reduce #2: rank 2 has not come; last seen in #1 (all_reduce, "),
              AllOf(StartsWith("recv from rank 2"), HasSubstr(": rank 2 has not taken part"))));
      store_->set("asked", "");
      sum.wait();
      message.wait();
    } else {
      store_->wait({"asked"}, 30s);
      group.all_reduce(tensor).wait();
      if (rank == 2) group.send(torch::ones({2}), 0).wait();
    }
    harness::meet(group);
    EXPECT_THAT(group.waiting_for(), IsEmpty());
  });
  EXPECT_THAT(log_.lines(), IsEmpty());
}

TEST_P(WaitsOver, TimeoutNamesTheAbsentRanks) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3, {});
    group.barrier().wait();
    if (rank == 0) {
      group = group.with_timeout(300ms);
      const Error late = error_of([&] { group.all_reduce(torch::ones({2})).wait(); });
      EXPECT_EQ(late.blame(), Blame::Timeout);
      for (const char* who : {"rank 1", "rank 2"}) {
        EXPECT_THAT(late.text(),
                    HasSubstr(std::string(who) + " has not come; last seen in #1 (barrier, "));
      }
      EXPECT_THAT(error_of([&] { group.barrier().wait(); }).text(),
                  HasSubstr("rank 2 has not come"))
          << "later calls name it as well";
      store_->set("late", "");
    } else {
      store_->wait({"late"}, 30s);
    }
  });
}

TEST_P(WaitsOver, NewGroupNamesTheAbsentRank) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    if (rank == 1) log_.await(1);
    auto made = group.new_group({0, 1, 2});
    made.barrier().wait();
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                                HasSubstr("in the making of group 'default/0-2'"),
                                HasSubstr("rank 1 has not come"), Not(HasSubstr("rank 2")),
                                HasSubstr("all its ranks must make it"))));
}

// The same happens to ranks that list the members of a group in different orders.
TEST_P(WaitsOver, ReportNamesTheGroupBeingMade) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    group.barrier().wait();
    if (rank == 2) {
      Work sum = group.all_reduce(torch::ones({1}));
      std::vector<std::string> lines;  // rank 0 may not have reached new_group yet
      EXPECT_TRUE(harness::comes_true([&] {
        lines = group.waiting_for();
        return lines.size() == 2 && lines[0].find("it is in") != std::string::npos;
      }));
      EXPECT_THAT(lines[0], HasSubstr("rank 0 has not come; last seen in #1 (barrier, "));
      EXPECT_THAT(lines[0], HasSubstr("); it is in the making of group 'default/0,1'"));
      store_->set("asked", "");
      sum.wait();
    } else {
      if (rank == 1) store_->wait({"asked"}, 30s);
      group.new_group({0, 1}).barrier().wait();
      group.all_reduce(torch::ones({1})).wait();
    }
  });
}

// The same happens to ranks that use two groups in opposite order.
TEST_P(WaitsOver, ReportNamesTheOtherGroup) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    auto other = group.new_group({0, 1});
    if (rank == 0) {
      group.all_reduce(torch::ones({1})).wait();
      other.all_reduce(torch::ones({1})).wait();
    } else {
      Work work = other.all_reduce(torch::ones({1}));
      log_.await(1);
      group.all_reduce(torch::ones({1})).wait();
      work.wait();
    }
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                                HasSubstr("in all_reduce #1 on group 'default': rank 1 has "),
                                HasSubstr("; it waits in all_reduce #1 of group 'default/0,1'"))));
}

TEST_P(WaitsOver, SplitNamesTheAbsentRank) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    group.barrier().wait();
    if (rank == 2) log_.await(1);
    auto made = group.split(0, rank);
    made.barrier().wait();
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                                HasSubstr("in split #1 of group 'default'"),
                                HasSubstr("rank 2 has not come; last seen in #1 (barrier, "))));
}

TEST_P(WaitsOver, MonitoredBarrierNamesTheAbsentRank) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    if (rank == 2) log_.await(1);
    group.monitored_barrier(30s);
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(StartsWith("rank 0 has waited"), HasSubstr("in monitored_barrier"),
                                HasSubstr("rank 2"))));
}

TEST_P(WaitsOver, LeavingReportsAPendingOperation) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    if (rank == 0) {
      static_cast<void>(group.all_reduce(torch::ones({2})));
      return;  // leaves the group
    }
    log_.await(1);
    group.all_reduce(torch::ones({2})).wait();
  });
  EXPECT_THAT(log_.lines(),
              ElementsAre(AllOf(StartsWith("rank 0 has waited"), HasSubstr("all_reduce #1"))));
}

TEST_P(WaitsOver, LeavingWarnsOfUnreceivedMessages) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2, {});
    for (const int messages : {0, 1, 2}) {
      auto other = group.new_group({0, 1});
      std::vector<Work> works;
      for (int i = 0; i < messages && rank == 0; ++i)
        works.push_back(other.send(torch::ones({1}), 1, 7));
      // The messages sent before this one have arrived when it has.
      if (rank == 0) {
        other.send(torch::ones({1}), 1, 8).wait();
      } else {
        other.recv(torch::ones({1}), 0, 8).wait();
      }
      if (rank == 0 || messages < 2) {
        other.leave(30s);
      }  // otherwise it leaves when its handle is destroyed
    }
    group.barrier().wait();
  });
  if (GetParam() == std::string("gloo")) {
    EXPECT_THAT(log_.lines(), IsEmpty()) << "Gloo does not know";
    return;
  }
  EXPECT_THAT(log_.lines(),
              ElementsAre(HasSubstr("rank 1 leaves group 'default/0,1#2' and has never received 1 "
                                    "message from rank 0 (tag 7, 4 bytes)"),
                          HasSubstr("and has never received 2 messages, of which the first is from "
                                    "rank 0 (tag 7, 4 bytes)")));
}

// As in a program that saves under `if (rank == 0)`.
TEST_P(WaitsOver, LoneCheckpointSaysAllMustCallIt) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2, kOnce, rank == 0 ? 1000ms : 60s);
    if (rank == 0) {
      const Error late = error_of([&] { checkpoint::save("never-written.pt", group, {}); });
      EXPECT_EQ(late.blame(), Blame::Timeout);
      EXPECT_THAT(late.text(),
                  AllOf(HasSubstr("checkpoint::save: "), HasSubstr("rank 1 has not come"),
                        HasSubstr("all ranks of the group must call checkpoint::save")));
      store_->set("late", "");
    } else {
      store_->wait({"late"}, 30s);
    }
  });
  EXPECT_THAT(log_.lines(), ElementsAre(HasSubstr("in checkpoint::save: ")));
}

TEST_P(WaitsOver, CheckpointNamesTheDepartedRank) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    if (rank == 1) return group.leave(30s);
    const Error left = error_of([&] { checkpoint::save("never-written.pt", group, {}); });
    EXPECT_EQ(left.blame(), Blame::PeerLost);
    EXPECT_THAT(left.text(), AllOf(HasSubstr("rank 1"),
                                   HasSubstr("all ranks of the group must call checkpoint::save")));
  });
}

using Ddp = DistributedDataParallel<torch::nn::LinearImpl>;
using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;

TEST_P(WaitsOver, DdpNamesTheAbsentRank) {
  on_ranks(3, [&](int rank) {
    auto group = join(rank, 3);
    const torch::nn::Linear net(2, 1);
    if (rank == 1) log_.await(1);
    const Ddp ddp(net, group);
  });
  EXPECT_THAT(
      log_.lines(),
      ElementsAre(AllOf(StartsWith("rank 0 has waited"), HasSubstr("in DistributedDataParallel: "),
                        HasSubstr("rank 1 has not come; last seen in no operation"),
                        Not(HasSubstr("rank 2")))));
}

// Leaving waits until the other rank has read this one's keys.
TEST_P(WaitsOver, StoreHostMayFinishFirst) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    const torch::nn::Linear net(2, 1);
    if (rank == 1) log_.await(1);
    const Zero zero(net->parameters(), group, torch::optim::SGDOptions(.1));
  });
  EXPECT_THAT(log_.lines(), ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                                              HasSubstr("in ZeroRedundancyOptimizer: "))));
}

TEST_P(WaitsOver, ConstructorTimeoutNamesAbsentRank) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2, kOnce, rank == 0 ? 1000ms : 60s);
    const torch::nn::Linear net(2, 1);
    if (rank == 0) {
      const Error late = error_of([&] { const Ddp ddp(net, group); });
      EXPECT_EQ(late.blame(), Blame::Timeout);
      EXPECT_THAT(
          late.text(),
          StartsWith("DistributedDataParallel: rank 1 did not come to its constructor within 1 s"));
      EXPECT_THAT(late.ranks(), ElementsAre(1));
      store_->set("late", "");
    } else {
      store_->wait({"late"}, 30s);
    }
  });
}

TEST_P(WaitsOver, ConstructorEndsIfTheOtherLeaves) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    if (rank == 1) return;
    const torch::nn::Linear net(2, 1);
    const Error left = error_of([&] { const Ddp ddp(net, group); });
    EXPECT_EQ(left.blame(), Blame::PeerLost);
    EXPECT_THAT(left.text(),
                AllOf(HasSubstr("rank 1 left group"), HasSubstr("must come to its constructor")));
    EXPECT_THAT(left.ranks(), ElementsAre(1));
  });
}

TEST_P(WaitsOver, ReportNamesAConstructorElsewhere) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2);
    auto other = group.new_group({0, 1});
    const torch::nn::Linear net(2, 1);
    if (rank == 1) {
      const Error ended = error_of([&] { const Ddp ddp(net, other); });
      EXPECT_EQ(ended.blame(), Blame::Cancelled) << ended.text();
    } else {
      std::thread asking([&] {
        log_.await(1);
        EXPECT_TRUE(harness::comes_true([&] {
          const auto lines = group.waiting_for();
          return lines.size() == 1 &&
                 lines[0].find("it waits in DistributedDataParallel: ") != std::string::npos;
        }));
        other.abort("the test ends");
        group.abort("the test ends");
      });
      EXPECT_EQ(error_of([&] { const Ddp ddp(net, group); }).blame(), Blame::Cancelled);
      asking.join();
    }
  });
}

TEST_P(WaitsOver, UnfinishedHookIsReportedAndEnds) {
  on_ranks(2, [&](int rank) {
    auto group = join(rank, 2, kOnce, 2s);
    const torch::nn::Linear net(2, 1);
    Ddp ddp(net, group);
    const Promise<at::Tensor> never;
    ddp.register_comm_hook([&](GradBucket&) { return never.future(); });
    std::thread asking([&] {
      log_.await(1);
      EXPECT_THAT(group.waiting_for(),
                  ElementsAre(HasSubstr("the comm hook of bucket 0: the future that it returned")));
    });
    const Error late = error_of([&] { ddp(torch::ones({1, 2})).sum().backward(); });
    asking.join();
    // The other rank may have left by then.
    EXPECT_THAT(late.blame(), testing::AnyOf(Blame::Timeout, Blame::PeerLost)) << late.text();
    EXPECT_THAT(late.text(), HasSubstr("the comm hook of bucket 0"));
  });
  EXPECT_THAT(log_.lines(), ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                                              HasSubstr("for the comm hook of bucket 0"))));
}

TEST(Waits, JoiningNamesTheAbsentRank) {
  WaitLog log;
  const std::string address = "tcp://127.0.0.1:" + std::to_string(launch::free_port()) + "?rank=";
  on_ranks(3, [&](int rank) {
    if (rank == 2) log.await(1);
    init_process_group(
        {.init_method = address + std::to_string(rank), .world_size = 3, .wait_reports = kOnce})
        .barrier()
        .wait();
  });
  EXPECT_THAT(
      log.lines(),
      ElementsAre(AllOf(StartsWith("rank 0 has waited"),
                        HasSubstr("in init_process_group of group 'default'"),
                        HasSubstr("rank 2 has not come"), Not(HasSubstr("rank 1")),
                        HasSubstr("0 of 3 by ?rank= of the URL and the option world_size"))));
}

TEST(Waits, JoiningReportsAMissingStore) {
  WaitLog log;
  const std::string address = "tcp://127.0.0.1:" + std::to_string(launch::free_port());
  on_ranks(2, [&](int rank) {
    if (rank == 0) log.await(1);
    init_process_group(
        {.init_method = address, .rank = rank, .world_size = 2, .wait_reports = kOnce})
        .barrier()
        .wait();
  });
  ASSERT_THAT(log.lines(), testing::SizeIs(testing::Ge(1u)));
  EXPECT_THAT(log.lines().front(),
              AllOf(StartsWith("rank 1 of 2 has waited"),
                    HasSubstr("rank 0, which should host the store at " + address),
                    HasSubstr("the option rank and the option world_size")));
}

// The kernel accepts connections for a stopped process, but nothing answers on them.
TEST(Waits, StoppedRankDoesNotAnswer) {
  harness::Processes processes(2, [](int rank) {
    auto group = init_process_group({.wait_reports = {}});
    group.barrier().wait();
    harness::Processes::say("ready");
    if (rank == 0) {
      Work sum = group.all_reduce(torch::ones({2}));
      std::vector<std::string> lines;  // rank 1 may not have stopped yet
      EXPECT_TRUE(harness::comes_true([&] {
        lines = group.waiting_for();
        return lines.size() == 1 && lines.front().find("not come") == std::string::npos;
      }));
      EXPECT_THAT(lines,
                  ElementsAre(HasSubstr("rank 1 does not answer; its process may be stopped")));
      harness::Processes::say("told");
      sum.wait();
    } else {
      ::raise(SIGSTOP);
      group.all_reduce(torch::ones({2})).wait();
    }
  });
  processes.wait_for(0, "ready");
  processes.wait_for(1, "ready");
  processes.wait_for(0, "told");
  processes.signal(1, SIGCONT);
  processes.expect_success();
}

TEST(WaitAnswer, SurvivesEncoding) {
  const WaitAnswer sent{7, true, {12, "#12 (all_reduce, 3 s ago)"}};
  const auto read = decode_wait_answer(encode(sent));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->round, 7u);
  EXPECT_TRUE(read->waits);
  EXPECT_EQ(read->progress.collectives, 12u);
  EXPECT_EQ(read->progress.last, sent.progress.last);
}

TEST(WaitCall, SurvivesEncoding) {
  const auto read = decode_wait_call(encode(WaitCall{7, "barrier"}));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->number, 7u);
  EXPECT_EQ(read->call, "barrier");
}

TEST(WaitCall, MalformedTextIsRefused) {
  for (const char* text :
       {"", "1", "1 ", "0 barrier", "x barrier", "-1 barrier", "99999999999999999999999 barrier"}) {
    EXPECT_FALSE(decode_wait_call(text)) << "'" << text << "'";
  }
  EXPECT_EQ(decode_wait_call("1 a\033b")->call, "a?b");
  EXPECT_EQ(decode_wait_call("1 " + std::string(100'000, 'x'))->call.size(), 300u);
}

TEST(WaitAnswer, MalformedTextIsRefused) {
  for (const char* text :
       {"", "1", "1 ", "1 0", "1 0 ", "1 0 5", "x 0 5 last", "1 2 5 last", "-1 0 5 last",
        "1 0 -5 last", "99999999999999999999999 0 5 last", "1 0 5\tlast", " 1 0 5 last"}) {
    EXPECT_FALSE(decode_wait_answer(text)) << "'" << text << "'";
  }
  EXPECT_EQ(decode_wait_answer("1 0 5 " + std::string(100'000, 'x'))->progress.last.size(), 300u)
      << "printed text is short";
}

}  // namespace
}  // namespace weft
