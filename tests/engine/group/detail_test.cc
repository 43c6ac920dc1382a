// SPDX-License-Identifier: Apache-2.0
// WEFT_DEBUG=detail: ranks compare their next operations before anything is sent.
#include <cstdlib>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;

// The environment is read once, at the first use of Weft.
const bool kDetail = [] { return ::setenv("WEFT_DEBUG", "Detail", 1) == 0; }();

// Expects both ranks to report the disagreement, with both calls.
void expect_disagreement(const std::function<Work(ProcessGroup&)>& on_0,
                         const std::function<Work(ProcessGroup&)>& on_1, const std::string& text_0,
                         const std::string& text_1) {
  ASSERT_TRUE(kDetail);
  const auto body = [&](ProcessGroup& group) {
    group.barrier().wait();
    const bool first = group.rank() == 0;
    const auto error = error_of([&] { (first ? on_0 : on_1)(group).wait(); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    const std::string expected = "ranks disagree in collective #2";
    EXPECT_NE(error.text().find(expected), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("rank 0 calls " + text_0), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("rank 1 calls " + text_1), std::string::npos) << error.text();
    const auto tensor = torch::ones({1});
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2) << "nothing was sent, so the group goes on";
  };
  for (const char* backend : {"gloo", "shm"})
    harness::run_ranks(As::Threads, 2, body, {.backend = backend});
}

// Uses gloo, because its messages carry bytes without a shape or dtype.
TEST(Detail, SeesMismatchedMessages) {
  ASSERT_TRUE(kDetail);
  for (const bool from_any : {false, true}) {
    const auto body = [from_any](ProcessGroup& group) {
      const int from = from_any ? kAnySource : 0;
      const auto exchange = [&](const at::Tensor& sent, const at::Tensor& received) {
        (group.rank() == 0 ? group.send(sent, 1, 3) : group.recv(received, from, 3)).wait();
      };
      const auto received = torch::zeros({2, 2});
      exchange(torch::ones({4}), received);
      EXPECT_EQ(received.sum().item<float>(), group.rank() == 0 ? 0 : 4) << "shapes may differ";
      const auto error = error_of([&] { exchange(torch::ones({4}), torch::zeros({4}, at::kInt)); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_NE(error.text().find("ranks disagree in message #2 of tag 3"), std::string::npos)
          << error.text();
      EXPECT_NE(error.text().find("sent 4 elements of Float"), std::string::npos) << error.text();
      EXPECT_NE(error.text().find("received 4 elements of Int"), std::string::npos) << error.text();
      exchange(torch::ones({4}), received);  // all bytes have been received, so the group goes on
    };
    harness::run_ranks(As::Threads, 2, body, {.backend = "gloo"});
  }
}

TEST(Detail, SeesDifferentShapes) {
  expect_disagreement(
      [](auto& group) {
        return group.all_reduce(torch::ones({2, 3}));
      },
      [](auto& group) {
        return group.all_reduce(torch::ones({3, 2}));
      },
      "all_reduce Float [2, 3]", "all_reduce Float [3, 2]");
}

TEST(Detail, SeesMismatchedAllToAllSizes) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    // Rank 0 sends parts of 3 elements and rank 1 parts of 4; each receives parts of its own size.
    const std::int64_t size = 3 + group.rank();
    const auto parts = [&] {
      return std::vector<at::Tensor>{torch::ones({size}), torch::ones({size})};
    };
    const auto error = error_of([&] { group.all_to_all(parts(), parts()).wait(); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    const std::string other = std::to_string(1 - group.rank());
    const std::string expected = "sends rank " + other + " " + std::to_string(size) +
                                 " elements, and that rank takes " + std::to_string(7 - size);
    EXPECT_NE(error.text().find(expected), std::string::npos) << error.text();
    const auto out =
        std::vector<at::Tensor>{torch::zeros({group.rank() + 1}), torch::zeros({group.rank() + 1})};
    group.all_to_all(out, {torch::ones({1}), torch::ones({2})}).wait();
    EXPECT_EQ(out[1][0].item<float>(), 1);
  });
}

TEST(Detail, SeesDifferentDtypes) {
  expect_disagreement([](auto& group) { return group.broadcast(torch::ones({2}), 0); },
                      [](auto& group) { return group.broadcast(torch::ones({2}, at::kInt), 0); },
                      "broadcast Float", "broadcast Int");
}

TEST(Detail, SeesDifferentOperatorsAndRoots) {
  expect_disagreement([](auto& group) { return group.all_reduce(torch::ones({2})); },
                      [](auto& group) { return group.all_reduce(torch::ones({2}), ReduceOp::Max); },
                      "all_reduce", "all_reduce");
  expect_disagreement([](auto& group) { return group.broadcast(torch::ones({2}), 0); },
                      [](auto& group) { return group.broadcast(torch::ones({2}), 1); }, "broadcast",
                      "broadcast");
}

TEST(Detail, SeesDifferentOperations) {
  expect_disagreement([](auto& group) { return group.all_reduce(torch::ones({2})); },
                      [](auto& group) { return group.barrier(); }, "all_reduce", "barrier");
}

TEST(Detail, NamesTheMissingRank) {
  harness::run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    // The limit holds for joining as well.
    auto all = group.new_group({0, 1, 2}, {.timeout = std::chrono::milliseconds(1500)});
    if (group.rank() != 1) {
      const auto error = error_of([&] { static_cast<void>(all.all_reduce(torch::ones({1}))); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("rank 1 did not come to collective #1"), std::string::npos)
          << error.text();
    }
    group.barrier().wait();
  });
}

TEST(Detail, AcceptsCorrectPrograms) {
  harness::run_ranks(As::Processes, 3, [](ProcessGroup& group) {
    for (int step = 0; step < 5; ++step) {
      const auto tensor = torch::ones({2});
      group.all_reduce(tensor).wait();
      EXPECT_EQ(tensor[0].item<float>(), 3);
      group.barrier().wait();
    }
    // Here the parts may differ from rank to rank.
    std::vector<at::Tensor> parts{torch::ones({1}), torch::ones({2}), torch::ones({3})};
    group.reduce_scatter(torch::zeros({group.rank() + 1}), parts).wait();
  });
}

}  // namespace
}  // namespace weft
