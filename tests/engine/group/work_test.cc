// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/engine/future/when_all.h>
#include <weft/engine/group/access.h>
#include <weft/group.h>
#include <weft/tests/harness/meet_in.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using std::chrono::milliseconds;

TEST(Work, EmptyWorkIsDone) {
  Work work;
  EXPECT_TRUE(work.query());
  EXPECT_FALSE(work.error());
  EXPECT_EQ(work.source_rank(), -1);
  work.wait();
  work.synchronize();
  work.future().get();
}

TEST(Work, CopiesShareOneOperation) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto tensor = torch::ones({4});
    Work work = group.all_reduce(tensor);
    Work copy = work;
    copy.wait();
    EXPECT_TRUE(work.query());
    EXPECT_EQ(work.source_rank(), -1);
    work.wait();
    work.wait(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU)));
    EXPECT_EQ(tensor[0].item<float>(), 2);
  });
}

TEST(Work, RefusesANegativeTime) {
  harness::run_ranks(As::Threads, 1, [](ProcessGroup& group) {
    Work work = group.all_reduce(torch::ones({1}));
    const auto error = error_of([&] { work.synchronize(milliseconds(-5)); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    work.synchronize(kGroupTimeout);
    work.synchronize(kNoTimeout);
    work.synchronize(milliseconds(0));
  });
}

TEST(Work, FutureIsDoneWhenTheBytesArrived) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto tensor = torch::ones({4});
    const float sum = group.all_reduce(tensor)
                          .future()
                          .then([tensor] { return tensor.sum().item<float>(); })
                          .get();
    EXPECT_EQ(sum, 8);
  });
}

class WorkOf : public testing::TestWithParam<const char*> {
 protected:
  static ProcessGroupOptions options() { return {.backend = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(, WorkOf, testing::Values("gloo", "tcp", "shm"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(WorkOf, ContinuationsMayUseTheGroup) {
  harness::run_ranks(
      As::Threads, 2,
      [](ProcessGroup& group) {
        const auto once = torch::ones({4}), twice = torch::ones({4});
        const auto both = [&] {
          return group.all_reduce(once).future().then([group, once, twice]() mutable {
            group.all_reduce(twice).wait();
            group.all_reduce(twice).future().get();
            group.barrier().wait();
            return once[0].item<float>() * 100 + twice[0].item<float>();
          });
        };
        EXPECT_EQ(both().get(), 204);
        // More continuations than run at a time, each waiting for the next one. None is done before
        // all are attached.
        constexpr int kMany = 12;
        const int other = 1 - group.rank();
        std::vector<Promise<void>> next(kMany);
        std::vector<Future<void>> ends;
        for (int i = 0; i < kMany; ++i) {
          ends.push_back(group.recv(torch::zeros({1}), other, i).future().then([&next, i] {
            const auto own = static_cast<std::size_t>(i);
            if (i + 1 < kMany) next[own + 1].future().get();
            next[own].set();
          }));
        }
        harness::meet(group);
        for (int i = 0; i < kMany; ++i) group.send(torch::ones({1}), other, i).wait();
        when_all(std::move(ends)).get();
      },
      options());
}

TEST_P(WorkOf, ContinuationMayDropTheLastHandle) {
  harness::run_ranks(
      As::Threads, 2,
      [](ProcessGroup& group) {
        ProcessGroup own = group.new_group({0, 1});
        const auto tensor = torch::ones({4});
        Future<void> done;
        {
          auto operation = own.all_reduce(tensor).future();
          done = operation.then(
              [last = std::make_shared<ProcessGroup>(std::move(own))]() mutable { last.reset(); });
        }
        done.get();
        EXPECT_EQ(tensor[0].item<float>(), 2);
      },
      options());
}

// Operations issued after it wait in line, those issued before do not, and the calling thread goes
// on.
TEST_P(WorkOf, BroadcastMayBeginLater) {
  harness::run_ranks(
      As::Threads, 2,
      [](ProcessGroup& group) {
        const bool is_root = group.rank() == 0;
        const auto before = torch::ones({3}), data = torch::zeros({3}), behind = torch::ones({3});
        const auto flag = std::make_shared<HostFlag>();
        Work first = group.all_reduce(before);
        Work later = group::broadcast(group, data, 0, is_root ? Fence(flag) : Fence());
        Work last = group.all_reduce(behind);
        first.wait();
        EXPECT_FALSE(later.query());
        EXPECT_FALSE(last.query());
        group.store()->add("first", 1);
        if (is_root) {
          EXPECT_TRUE(harness::comes_true([&] { return group.store()->add("first", 0) == 2; }));
          data.fill_(7);
          flag->raise();
        }
        last.wait();
        later.wait();  // Gloo's operations end in any order
        EXPECT_EQ(data[0].item<float>(), 7);
      },
      options());
}

TEST_P(WorkOf, AbortEndsAnUnstartedBroadcast) {
  harness::run_ranks(
      As::Threads, 2,
      [](ProcessGroup& group) {
        const auto never = std::make_shared<HostFlag>();
        // Rank 1 may issue its broadcast after rank 0 has aborted; then its call throws.
        const auto error = error_of([&] {
          Work later = group::broadcast(group, torch::zeros({3}), 0,
                                        group.rank() == 0 ? Fence(never) : Fence());
          if (group.rank() == 0) group.abort("no values");
          later.wait();
        });
        EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
      },
      options());
}

TEST(Work, ThrowsItsErrorAtEveryWait) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    harness::meet(group);
    if (group.rank() == 1) {
      EXPECT_EQ(error_of([&] { group.recv(torch::ones({1}), 0).wait(); }).blame(),
                Blame::Cancelled);
      return;
    }
    Work work = group.recv(torch::ones({1}), 1);
    Future<void> future = work.future();
    EXPECT_FALSE(work.query());
    group.abort("enough");
    for (int i = 0; i < 2; ++i) {
      const auto error = error_of([&] { work.wait(); });
      EXPECT_EQ(error.blame(), Blame::Cancelled);
      EXPECT_NE(error.text().find("recv from rank 1"), std::string::npos) << error.text();
      EXPECT_NE(error.text().find("enough"), std::string::npos) << error.text();
    }
    EXPECT_TRUE(work.query()) << "a failed operation has passed";
    EXPECT_EQ(work.error()->blame(), Blame::Cancelled);
    EXPECT_EQ(error_of([&] { future.get(); }).blame(), Blame::Cancelled);
  });
}

TEST(Work, UnseenErrorSurfacesOnTheGroup) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1}).with_timeout(milliseconds(200));
    if (group.rank() == 0) {
      static_cast<void>(other.recv(torch::ones({1}), 1));  // never sent, and its Work is dropped
      const auto error = error_of([&] {
        for (;;) other.recv(torch::ones({1}), 1).wait();
      });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    }
    group.barrier().wait();  // rank 1 runs into no timeout of its own before
    if (group.rank() == 1) {
      const auto error = error_of([&] { other.recv(torch::ones({1}), 0).wait(); });
      EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost)
          << error.what();
    }
  });
}

TEST(Abort, FreesBlockedRanksWithTheReason) {
  harness::run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    auto all = group.new_group({0, 1, 2});
    harness::meet(group);
    if (group.rank() == 2) all.abort("the loss is not a number");
    const auto error =
        error_of([&] { all.all_reduce(torch::ones({1})).wait(); });  // pending or later
    EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
    EXPECT_NE(error.text().find("rank 2"), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("aborted the group: the loss is not a number"), std::string::npos)
        << error.text();
    const auto later = error_of([&] { all.barrier().wait(); });
    EXPECT_EQ(later.blame(), Blame::Cancelled);
    const auto sending =
        error_of([&] { all.send(torch::ones({1}), (group.rank() + 1) % 3).wait(); });
    EXPECT_EQ(sending.blame(), Blame::Cancelled);
    const auto tensor = torch::ones({1});
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 3) << "the parent goes on";
  });
}

// Rank 1 learns of it from the backend or from the membership, whichever is faster.
TEST(Abort, IsWordedAlikeOnEveryRank) {
  for (const char* backend : {"gloo", "tcp"}) {
    harness::run_ranks(
        As::Threads, 2,
        [](ProcessGroup& group) {
          Work work = group.recv(torch::ones({1}), 1 - group.rank());
          auto future = work.future();
          harness::meet(group);
          if (group.rank() == 0) group.abort("over");
          const auto error = error_of([&] { work.wait(); });
          EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
          EXPECT_NE(error.text().find("rank 0 aborted the group: over"), std::string::npos)
              << error.text();
          EXPECT_EQ(error_of([&] { future.get(); }).text(), error.text());
        },
        {.backend = backend});
  }
}

TEST(Abort, EndsAReceiveFromAnySource) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    Work work = group.recv(torch::ones({1}));
    harness::meet(group);
    if (group.rank() == 0) group.abort("over");
    EXPECT_EQ(error_of([&] { work.wait(); }).blame(), Blame::Cancelled);
  });
}

TEST(Abort, EndsAPendingNewGroup) {
  for (const char* backend : {"gloo", "tcp"}) {
    harness::run_ranks(
        As::Threads, 3,
        [](ProcessGroup& group) {
          if (group.rank() == 2) {
            harness::store_of_later(group, "default/0-2", {0, 1, 2})
                .get_all({"weft/here/0", "weft/here/1"}, Deadline::in(harness::kLimit));
            return group.abort("over");
          }
          const auto error = error_of([&] { group.new_group({0, 1, 2}); });
          EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
          EXPECT_NE(error.text().find("rank 2 aborted the group: over"), std::string::npos)
              << error.text();
        },
        {.backend = backend});
  }
}

TEST(Abort, ReachesARankThatIsJoining) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    if (group.rank() == 0) {
      group.barrier().wait();
      const auto error = error_of([&] { group.new_group({0, 1}, {.backend = "carrier-pigeon"}); });
      EXPECT_EQ(error.blame(), Blame::Caller);
    } else {
      group.barrier().wait();
      const auto error = error_of([&] { group.new_group({0, 1}); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_NE(error.text().find("rank 0 could not join"), std::string::npos) << error.text();
    }
  });
}

}  // namespace
}  // namespace weft
