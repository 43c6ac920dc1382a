// SPDX-License-Identifier: Apache-2.0
// Collectives and messages of C++ values.
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/objects.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kRoot = 2;

struct Report {
  std::string name;
  std::map<int, std::vector<double>> losses;
  at::Tensor weights;
  WEFT_FIELDS(name, losses, weights)
};

// Each rank's report has a different size.
Report report_of(int rank) {
  Report made{
      std::string(static_cast<std::size_t>(rank * 1000), 'x'), {}, torch::full({rank, 2}, rank)};
  for (int i = 0; i < rank; ++i) made.losses[i] = {0.5 * rank, i + 1.0};
  return made;
}

void expect_report(const Report& report, int rank) {
  const Report wanted = report_of(rank);
  EXPECT_EQ(report.name, wanted.name);
  EXPECT_EQ(report.losses, wanted.losses);
  EXPECT_TRUE(torch::equal(report.weights, wanted.weights));
}

class Objects : public testing::TestWithParam<const char*> {
 protected:
  static void on_ranks(const harness::Body& body) {
    harness::run_ranks(As::Threads, kRanks, body, {.backend = GetParam()});
  }
};

TEST_P(Objects, BroadcastGivesTheRootsValue) {
  on_ranks([](ProcessGroup& group) {
    for (int root = 0; root < kRanks; ++root)
      expect_report(broadcast_object(report_of(group.rank()), root, group), root);
    EXPECT_EQ(broadcast_object(group.rank() == 1 ? 7 : 0, 1, group), 7);
  });
}

TEST_P(Objects, AllGatherGivesEveryRanksValue) {
  on_ranks([](ProcessGroup& group) {
    const auto all = all_gather_object(report_of(group.rank()), group);
    ASSERT_EQ(all.size(), kRanks);
    for (int rank = 0; rank < kRanks; ++rank)
      expect_report(all[static_cast<std::size_t>(rank)], rank);
  });
}

TEST_P(Objects, GatherGivesAllValuesToTheRoot) {
  on_ranks([](ProcessGroup& group) {
    const auto all = gather_object(report_of(group.rank()), kRoot, group);
    ASSERT_EQ(all.size(), group.rank() == kRoot ? kRanks : 0);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      expect_report(all[rank], static_cast<int>(rank));
  });
}

TEST_P(Objects, ScatterGivesEachRankItsOwn) {
  on_ranks([](ProcessGroup& group) {
    std::vector<Report> all;
    for (int rank = 0; rank < kRanks && group.rank() == kRoot; ++rank)
      all.push_back(report_of(rank));
    expect_report(scatter_object(all, kRoot, group), group.rank());
  });
}

TEST_P(Objects, MessagesArriveFromAnyRank) {
  on_ranks([](ProcessGroup& group) {
    if (group.rank() != 0) {
      send_object(report_of(group.rank()), 0, group, /*tag=*/5);
      send_object(std::string("done"), 0, group);
      return;
    }
    int sum = 0;
    for (int i = 1; i < kRanks; ++i) {
      int source = -1;
      const auto report = recv_object<Report>(kAnySource, group, /*tag=*/5, &source);
      expect_report(report, source);
      sum += source;
    }
    EXPECT_EQ(sum, 1 + 2);
    for (int rank = 1; rank < kRanks; ++rank)
      EXPECT_EQ(recv_object<std::string>(rank, group), "done");
  });
}

// Each object is two messages, and those of several threads must not mix.
TEST_P(Objects, ThreadsMayShareATag) {
  constexpr int kThreads = 4, kEach = 30;
  on_ranks([](ProcessGroup& group) {
    std::atomic<int> sum = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < kEach; ++i) {
          if (group.rank() == 0) {
            sum += recv_object<int>(kAnySource, group, /*tag=*/3);
          } else if (thread < kThreads / (kRanks - 1)) {
            send_object(100 * group.rank() + thread, 0, group, /*tag=*/3);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (group.rank() == 0) EXPECT_EQ(sum, kEach * (100 + 101 + 200 + 201));
  });
}

TEST_P(Objects, RefusesWrongArguments) {
  on_ranks([](ProcessGroup& group) {
    const Error foreign = error_of([&] {
      group.rank() == 0 ? static_cast<void>(broadcast_object(std::string("text"), 0, group))
                        : static_cast<void>(broadcast_object(std::vector<int>(), 0, group));
      throw Error(Blame::Caller, "rank 0 has its own");
    });
    EXPECT_EQ(foreign.blame(), Blame::Caller);
    const Error few = error_of([&] {
      scatter_object(std::vector<int>{1, 2}, group.rank(), group);
    });
    EXPECT_EQ(few.blame(), Blame::Caller);
    EXPECT_THAT(few.text(), HasSubstr("gives one for each of the 3 ranks"));
    const Error root = error_of([&] { gather_object(1, kRanks, group); });
    EXPECT_EQ(root.blame(), Blame::Caller);
    EXPECT_THAT(root.text(), HasSubstr("gather_object: root"));
    EXPECT_EQ(all_gather_object(group.rank(), group), (std::vector<int>{0, 1, 2}))
        << "all ranks are in step";
  });
}

TEST_P(Objects, TypeMismatchNamesRankAndTypes) {
  on_ranks([](ProcessGroup& group) {
    const bool last = group.rank() == 2;
    const std::string own = last ? "double" : "int", theirs = last ? "int" : "double";
    const std::string whose = last ? "rank 0" : "rank 2";
    const Error all = error_of([&] {
      last ? static_cast<void>(all_gather_object(2.5, group))
           : static_cast<void>(all_gather_object(7, group));
    });
    EXPECT_EQ(all.blame(), Blame::Caller);
    EXPECT_EQ(all.text(), "all_gather_object: the value of " + whose + " is of type " + theirs +
                              ", and this rank takes values of type " + own +
                              "; give all ranks the same type");
    const std::vector<std::string> names{"a", "b", "c"};
    const Error part = error_of([&] {
      last ? static_cast<void>(scatter_object(names, 2, group))
           : static_cast<void>(scatter_object(std::vector<int>(), 2, group));
      if (last) throw Error(Blame::Caller, "rank 2 has its own");
    });
    if (!last)
      EXPECT_THAT(part.text(),
                  HasSubstr("scatter_object: the value of rank 2 is of type std::string, and"));
    if (group.rank() == 0) send_object(1L << 40, 1, group);
    if (group.rank() == 1) {
      EXPECT_THAT(error_of([&] { recv_object<int>(kAnySource, group); }).text(),
                  HasSubstr("recv_object: the value of rank 0 is of type long, and this rank takes "
                            "values of type int"));
    }
    EXPECT_EQ(all_gather_object(group.rank(), group), (std::vector<int>{0, 1, 2}))
        << "all ranks are in step";
  });
}

TEST_P(Objects, BytesWithoutATypeAreRefused) {
  for (const auto& bytes :
       {detail::Bytes(), detail::Bytes(1), detail::Bytes(2), detail::Bytes(64, std::byte{0xff})}) {
    EXPECT_EQ(error_of([&] { detail::of_type(typeid(int), bytes, "broadcast_object", 1); }).blame(),
              Blame::Caller);
  }
}

// The size that a rank announces is checked before memory is allocated for it.
TEST_P(Objects, AbsurdSizeIsRefusedOnAllRanks) {
  on_ranks([](ProcessGroup& group) {
    const Error error = error_of([&] {
      if (group.rank() != 0) return static_cast<void>(broadcast_object(0, 0, group));
      group.broadcast(torch::full({1}, std::int64_t{1} << 50, at::kLong), 0).wait();
      throw Error(Blame::Caller, "a value of");
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("a value of"));
  });
}

INSTANTIATE_TEST_SUITE_P(Group, Objects, testing::Values("gloo", "tcp", "shm", "inproc"));

}  // namespace
}  // namespace weft
