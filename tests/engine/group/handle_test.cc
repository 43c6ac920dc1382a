// SPDX-License-Identifier: Apache-2.0
// Functions of a group besides its operations: its error, time limits, leaving.
#include <csignal>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/base/make_error.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/core.h>
#include <weft/group.h>
#include <weft/profiling/trace/dump.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::comes_true;
using harness::error_of;
using harness::Processes;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr seconds kForever{1000};

class Handle : public testing::TestWithParam<const char*> {
 protected:
  static void run(int ranks, const std::function<void(ProcessGroup&)>& body) {
    harness::run_ranks(As::Threads, ranks, body, {.backend = GetParam(), .timeout = kForever});
  }
};
const auto backend_name = [](const auto& instance) { return std::string(instance.param); };
INSTANTIATE_TEST_SUITE_P(, Handle, testing::Values("gloo", "tcp", "shm"), backend_name);

TEST_P(Handle, ReportsNoErrorWithoutAFailure) {
  run(2, [](ProcessGroup& group) {
    EXPECT_FALSE(group.error());
    group.all_reduce(torch::ones({4})).wait();
    EXPECT_FALSE(group.error());
    EXPECT_EQ(error_of([&] {
                static_cast<void>(group.all_reduce(torch::ones({2, 2}).t()));
              }).blame(),
              Blame::Caller);
    EXPECT_FALSE(group.error()) << "a refused call breaks nothing";
    group.barrier().wait();
    EXPECT_EQ(error_of([] { static_cast<void>(ProcessGroup().error()); }).blame(), Blame::Caller);
  });
}

TEST_P(Handle, ReportsAnAbort) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1});
    harness::meet(group);
    if (group.rank() == 1) other.abort("enough");
    ASSERT_TRUE(comes_true([&] { return other.error().has_value(); }));
    const Error error = *other.error();
    EXPECT_EQ(error.blame(), Blame::Cancelled);
    EXPECT_THAT(error.text(), HasSubstr("enough"));
    EXPECT_EQ(error_of([&] { static_cast<void>(other.barrier()); }).text(), error.text())
        << "the next call throws it";
    EXPECT_EQ(other.error()->text(), error.text()) << "asking does not clear the error";
    EXPECT_FALSE(group.error());
    group.barrier().wait();
  });
}

TEST_P(Handle, ReportsUnobservedFailures) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1}).with_timeout(milliseconds(200));
    if (group.rank() == 0) {
      static_cast<void>(other.recv(torch::ones({1}), 1));
      ASSERT_TRUE(comes_true([&] { return other.error().has_value(); }));
      EXPECT_EQ(other.error()->blame(), Blame::Timeout);
    }
    group.barrier().wait();
  });
}

// --- a limit for one operation

TEST_P(Handle, ExpiredLimitBreaksTheGroup) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1});
    const auto limited = other.with_timeout(milliseconds(200));
    EXPECT_EQ(limited.rank(), other.rank());
    if (group.rank() == 0) {
      auto handle = limited;
      Work work = handle.all_reduce(torch::ones({4}));
      const Error error = error_of([&] { work.wait(); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      const std::string why =
          ": not all ranks took part within 200 ms, the limit of with_timeout()";
      EXPECT_THAT(error.text(), AllOf(StartsWith("all_reduce #1 on group 'default/0,1' ("),
                                      HasSubstr("rank 0 of 2)" + why)));
      EXPECT_THAT(other.error()->text(), HasSubstr("(rank 0 of 2): all_reduce #1" + why));
      EXPECT_EQ(error_of([&] { static_cast<void>(other.barrier()); }).blame(), Blame::Timeout);
      ASSERT_TRUE(other.error());
    }
    group.barrier().wait();
  });
}

TEST_P(Handle, LimitHoldsForEachOperation) {
  using Call = Work (*)(ProcessGroup&);
  const Call calls[] = {
      [](ProcessGroup& group) { return group.barrier(); },
      [](ProcessGroup& group) { return group.recv(torch::ones({1}), 1); },
      [](ProcessGroup& group) { return group.recv(torch::ones({1})); },
      [](ProcessGroup& group) { return group.broadcast(torch::ones({1}), 1); },
      [](ProcessGroup& group) { return group.reduce(torch::ones({1}), 0); },
      [](ProcessGroup& group) { return group.all_gather_into(torch::ones({2}), torch::ones({1})); },
      [](ProcessGroup& group) {
        return group.all_gather({torch::ones({1}), torch::ones({1})}, torch::ones({1}));
      },
      [](ProcessGroup& group) {
        return group.gather({torch::ones({1}), torch::ones({1})}, torch::ones({1}), 0);
      },
      [](ProcessGroup& group) { return group.scatter(torch::ones({1}), {}, 1); },
      [](ProcessGroup& group) {
        return group.reduce_scatter(torch::ones({1}), {torch::ones({1}), torch::ones({1})});
      },
      [](ProcessGroup& group) {
        return group.reduce_scatter_into(torch::ones({1}), torch::ones({2}));
      },
      [](ProcessGroup& group) {
        return group.all_to_all({torch::ones({1}), torch::ones({1})},
                                {torch::ones({1}), torch::ones({1})});
      },
  };
  run(2, [&](ProcessGroup& group) {
    for (const Call call : calls) {
      auto other = group.new_group({0, 1});
      if (group.rank() == 0) {
        auto limited = other.with_timeout(milliseconds(50));
        const Error error = error_of([&] { call(limited).wait(); });
        EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      }
      group.barrier().wait();
    }
  });
}

TEST_P(Handle, LimitHoldsIfTheWorkIsDropped) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1});
    if (group.rank() == 0) {
      static_cast<void>(other.with_timeout(milliseconds(100)).all_reduce(torch::ones({4})));
      EXPECT_TRUE(comes_true([&] { return other.error().has_value(); }));
      EXPECT_EQ(other.error()->blame(), Blame::Timeout);
    }
    group.barrier().wait();
  });
}

TEST_P(Handle, KeptLimitChangesNothing) {
  run(2, [](ProcessGroup& group) {
    auto limited = group.with_timeout(seconds(30));
    for (int i = 0; i < 20; ++i) {
      const auto tensor = torch::ones({1000});
      limited.all_reduce(tensor).wait();
      EXPECT_EQ(tensor[999].item<float>(), 2);
    }
    limited.monitored_barrier(kGroupTimeout);
    // A handle made from a limited handle has its own limit; the first keeps its own.
    auto shorter = limited.with_timeout(seconds(20));
    shorter.barrier().wait();
    group.barrier().wait();
    EXPECT_FALSE(group.error());
    for (const auto wrong :
         {milliseconds(0), milliseconds(-1), milliseconds(kForever) + milliseconds(1)}) {
      const Error error = error_of([&] { static_cast<void>(group.with_timeout(wrong)); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("ProcessGroupOptions::timeout"));
    }
  });
}

// --- leaving

TEST_P(Handle, LeavesWithinALimit) {
  run(3, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1, 2});
    const auto tensor = torch::ones({4});
    Work last = other.all_reduce(tensor);
    const auto copy = other;
    other.leave(seconds(30));
    EXPECT_TRUE(last.query()) << "this rank's operations have ended";
    EXPECT_EQ(tensor[0].item<float>(), 3);
    for (auto handle : {other, copy}) {
      const Error error = error_of([&] { static_cast<void>(handle.barrier()); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("has left"));
      EXPECT_EQ(error_of([&] { handle.leave(seconds(1)); }).blame(), Blame::Caller);
      EXPECT_EQ(error_of([&] {
                  static_cast<void>(handle.send(torch::ones({1}), (handle.rank() + 1) % 3));
                }).blame(),
                Blame::Caller);
      EXPECT_EQ(error_of([&] { static_cast<void>(handle.split(0, 0)); }).blame(), Blame::Caller);
      EXPECT_EQ(error_of([&] { handle.monitored_barrier(seconds(1)); }).blame(), Blame::Caller);
    }
    EXPECT_FALSE(other.error());
    EXPECT_EQ(error_of([&] { group.leave(milliseconds(0)); }).blame(), Blame::Caller);
    group.barrier().wait();
  });
}

TEST_P(Handle, LeavingNamesTheRankItWaitsFor) {
  run(3, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1, 2});
    harness::meet(group);
    if (group.rank() == 0) {
      // Rank 1 has not received the message; rank 2 has nothing left to do.
      Work sent = other.send(torch::ones({1}), 1);
      const Error error = error_of([&] { other.leave(milliseconds(300)); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("300 ms"));
      EXPECT_THAT(error.text(),
                  HasSubstr("rank 1"));  // Gloo's send has not ended; other backends' have
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_EQ(error_of([&] { static_cast<void>(other.barrier()); }).blame(), Blame::Caller)
          << "this rank has left nevertheless";
    } else if (group.rank() == 2) {
      other.leave(seconds(30));
    }
    group.barrier().wait();
    if (group.rank() == 1) other.recv(torch::ones({1}), 0).wait();
    group.barrier().wait();
  });
}

TEST_P(Handle, LeavesABrokenGroupAtOnce) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1});
    harness::meet(group);
    if (group.rank() == 0) other.abort("enough");
    ASSERT_TRUE(comes_true([&] { return other.error().has_value(); }));
    other.leave(kForever);
    group.barrier().wait();
  });
}

// --- which ranks

TEST_P(Handle, MonitoredBarrierGivesAbsentRanks) {
  run(4, [](ProcessGroup& group) {
    if (group.rank() == 0)
      group::store_of(group).get_all({"monitored/1/2"}, Deadline::in(kForever));  // rank 2 has come
    if (group.rank() % 2 == 0) {
      const auto limit = milliseconds(group.rank() == 0 ? 300 : 20'000);
      const Error error = error_of([&] { group.monitored_barrier(limit); });
      EXPECT_EQ(error.blame(), Blame::Timeout);
      EXPECT_THAT(error.text(), HasSubstr("ranks 1, 3 did not come"));
      EXPECT_THAT(error.ranks(), ElementsAre(1, 3));
      EXPECT_THAT(error.within("training").ranks(), ElementsAre(1, 3));
    }
    group.barrier().wait();
  });
}

TEST_P(Handle, SplitGivesTheAbsentRank) {
  run(3, [](ProcessGroup& group) {
    auto other = group.new_group({2, 0, 1}, {.timeout = seconds(4)});  // also limits joining
    if (group.rank() != 0) {
      const Error error = error_of([&] { static_cast<void>(other.split(0, 0)); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("rank 1 did not"));  // its rank in this group
      EXPECT_THAT(error.ranks(), ElementsAre(1));
    }
    group.barrier().wait();
  });
}

TEST_P(Handle, ErrorGivesTheRankThatLeft) {
  run(3, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1, 2});
    if (group.rank() == 1) {
      other.leave(seconds(30));
      group.barrier().wait();
      return;
    }
    ASSERT_TRUE(comes_true([&] { return other.living_ranks().size() == 2; }));
    const Error error = error_of([&] { other.all_reduce(torch::ones({1})).wait(); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("rank 1"));
    EXPECT_THAT(error.ranks(), ElementsAre(1));
    EXPECT_THAT(error_of([&] { static_cast<void>(other.send(torch::ones({1}), 1)); }).ranks(),
                ElementsAre(1));
    group.barrier().wait();
  });
}

// shm and tcp know which ranks are missing; Gloo does not.
class MeshHandle : public Handle {};
INSTANTIATE_TEST_SUITE_P(, MeshHandle, testing::Values("tcp", "shm"), backend_name);

TEST_P(MeshHandle, TransportToEveryRankIsNamed) {
  run(3, [](ProcessGroup& group) {
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(group.transport(peer), GetParam());
    EXPECT_EQ(group.new_group({0, 1, 2}, {.backend = "weft"}).transport(2), "shm");
    for (const int wrong : {-1, 3})
      EXPECT_EQ(error_of([&] { static_cast<void>(group.transport(wrong)); }).blame(),
                Blame::Caller);
    group.barrier().wait();
  });
}

TEST_P(MeshHandle, DumpNamesTheTransports) {
  run(3, [](ProcessGroup& group) {
    group.barrier().wait();  // the ranks share a process: each has recorded its own
    const std::string own[] = {"1, 2", "0, 2", "0, 1"};
    const trace::Member& member = group::Core::of(group).member;
    const std::string party = R"("rank":)" + std::to_string(group.rank()) +
                              R"(,"ranks":[0,1,2],"generation":)" +
                              std::to_string(member.generation());
    EXPECT_THAT(trace::dump("asked"), HasSubstr(party + R"(,"transports":")" + GetParam() +
                                                " to ranks " + own[group.rank()] + "\""));
    group.barrier().wait();
  });
}

TEST_P(MeshHandle, CollectiveGivesTheAbsentRanks) {
  run(3, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1, 2}, {.timeout = seconds(4)});  // also limits joining
    if (group.rank() != 2) {
      const Error error =
          error_of([&] { other.all_gather_into(torch::ones({3}), torch::ones({1})).wait(); });
      // One rank may hear of it from the other: a rank that gives up reports the reason.
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_THAT(error.ranks(), ElementsAre(2)) << error.what();
    }
    group.barrier().wait();
  });
}

class KilledHandle : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, KilledHandle, testing::Values("gloo", "tcp", "shm"), backend_name);

TEST_P(KilledHandle, GroupErrorGivesTheLostRank) {
  Processes processes(3, [](int rank) {
    auto group = init_process_group({.backend = GetParam(), .timeout = kForever});
    // In another order, because an error gives ranks of its own group.
    auto other = group.new_group({1, 2, 0});
    group.barrier().wait();
    Work pending = rank == 2 ? Work() : group.all_reduce(torch::ones({4}));
    Processes::say("ready");
    if (rank == 2) {
      for (;;) ::pause();
    }
    ASSERT_TRUE(comes_true([&] { return group.error() && other.error(); }));
    EXPECT_EQ(group.error()->blame(), Blame::PeerLost);
    EXPECT_THAT(group.error()->ranks(), ElementsAre(2));
    EXPECT_THAT(group.error()->text(), HasSubstr("rank 2 is lost"));
    EXPECT_THAT(other.error()->ranks(), ElementsAre(1));
    EXPECT_THAT(other.error()->text(), HasSubstr("rank 1 is lost"));
    EXPECT_THAT(error_of([&] { pending.wait(); }).ranks(), ElementsAre(2));
    EXPECT_THAT(error_of([&] { static_cast<void>(group.barrier()); }).ranks(), ElementsAre(2));
    EXPECT_THAT(error_of([&] {
                  static_cast<void>(group.new_group({0, 1, 2}));
                }).ranks(),
                ElementsAre(2));
    group.leave(kForever);  // does not wait
    other.leave(kForever);
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(2, SIGKILL);
  processes.expect_success({2});
}

TEST(Ranks, ErrorKeepsItsRanksSorted) {
  const Error error = Error(Blame::PeerLost, "ranks 1, 3 are lost").with_ranks({3, 1, 3});
  EXPECT_THAT(error.ranks(), ElementsAre(1, 3));
  EXPECT_THAT(error.within("here").ranks(), ElementsAre(1, 3));
  EXPECT_THAT(error.with_text("lost").ranks(), ElementsAre(1, 3));
  EXPECT_THAT(to_error(std::make_exception_ptr(error), Blame::Caller).ranks(), ElementsAre(1, 3));
  EXPECT_THAT(Error(Blame::Caller, "no rank").ranks(), IsEmpty());
  EXPECT_EQ(ranks_text({}), "");
  EXPECT_EQ(ranks_text({2}), "rank 2");
  EXPECT_EQ(ranks_text({0, 2}), "ranks 0, 2");
}

}  // namespace
}  // namespace weft
