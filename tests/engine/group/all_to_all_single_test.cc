// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using Splits = std::vector<std::int64_t>;

class AllToAllSingle : public testing::TestWithParam<const char*> {
 protected:
  static void on_ranks(int ranks, const harness::Body& body) {
    harness::run_ranks(As::Threads, ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(, AllToAllSingle, testing::Values("gloo", "shm", "tcp"),
                         [](const auto& info) { return info.param; });

// Row `i` of what rank `from` sends to rank `to`.
at::Tensor rows_of(int from, int to, std::int64_t rows) {
  return torch::full({rows, 2}, 10 * from + to, at::kInt);
}

TEST_P(AllToAllSingle, DividesRowsEquallyWithoutSplits) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto mine = group.rank();
    std::vector<at::Tensor> sent, expected;
    for (int peer = 0; peer < 3; ++peer) {
      sent.push_back(rows_of(mine, peer, 2));
      expected.push_back(rows_of(peer, mine, 2));
    }
    const auto output = torch::zeros({6, 2}, at::kInt);
    group.all_to_all_single(output, torch::cat(sent)).wait();
    EXPECT_TRUE(torch::equal(output, torch::cat(expected)));
  });
}

// Rank r sends r + p rows to rank p, so rank 0 sends itself none.
TEST_P(AllToAllSingle, SendsAsManyRowsAsTheSplitsSay) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto mine = group.rank();
    std::vector<at::Tensor> sent, expected;
    Splits splits;
    for (int peer = 0; peer < 3; ++peer) {
      splits.push_back(mine + peer);
      sent.push_back(rows_of(mine, peer, mine + peer));
      expected.push_back(rows_of(peer, mine, mine + peer));
    }
    const auto input = torch::cat(sent);
    const auto output = torch::zeros_like(input);
    group.all_to_all_single(output, input, splits, splits).wait();
    EXPECT_TRUE(torch::equal(output, torch::cat(expected)));
  });
}

TEST_P(AllToAllSingle, TakesPartWithoutRowsOfItsOwn) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 0) {
      const auto none = torch::zeros({0, 2}, at::kInt);
      const auto output = torch::zeros({3, 2}, at::kInt);
      group.all_to_all_single(output, none, {0, 3}, {0, 0}).wait();
      EXPECT_TRUE(torch::equal(output, rows_of(1, 0, 3)));
    } else {
      const auto output = torch::zeros({0, 2}, at::kInt);
      group.all_to_all_single(output, rows_of(1, 0, 3), {0, 0}, {3, 0}).wait();
    }
  });
}

TEST_P(AllToAllSingle, MeetsAnAllToAllOfAnotherRank) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto number = [](int value) { return torch::full({1}, value, at::kInt); };
    const auto mine = group.rank();
    const auto output = torch::zeros({2}, at::kInt);
    const auto input = torch::cat({number(10 * mine), number(10 * mine + 1)});
    if (mine == 0) {
      group.all_to_all_single(output, input).wait();
    } else {
      group.all_to_all(output.chunk(2), input.chunk(2)).wait();
    }
    EXPECT_TRUE(torch::equal(output, torch::cat({number(mine), number(10 + mine)})));
  });
}

TEST_P(AllToAllSingle, MovesComplexAndEmptyTensors) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto none = torch::zeros({0, 4});
    group.all_to_all_single(none.clone(), none).wait();
    const auto input = torch::full({2, 3}, 1.0 + group.rank(), at::kComplexFloat);
    const auto output = torch::zeros_like(input);
    group.all_to_all_single(output, input).wait();
    EXPECT_TRUE(torch::equal(torch::real(output).select(1, 0), torch::tensor({1.0F, 2.0F})));
  });
}

TEST_P(AllToAllSingle, RefusesWrongArgumentsByName) {
  struct Wrong {
    std::function<void(ProcessGroup&)> call;
    std::string text;
  };
  const auto rows = [](std::int64_t count) { return torch::zeros({count, 2}); };
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const std::vector<Wrong> wrong = {
      {[&](auto& g) { g.all_to_all_single(rows(3), rows(3)).wait(); },
       "input has 3 rows, which 2 ranks cannot divide equally; give input_splits"},
      {[&](auto& g) { g.all_to_all_single(rows(3), rows(2)).wait(); },
       "output has 3 rows, which 2 ranks cannot divide equally; give output_splits"},
      {[&](auto& g) { g.all_to_all_single(rows(2), rows(2), {}, {2}).wait(); },
       "input_splits has 1 numbers for 2 ranks"},
      {[&](auto& g) {
         g.all_to_all_single(rows(2), rows(2), {}, {3, -1}).wait();
       },
       "input_splits do not add up to the 2 rows"},
      {[&](auto& g) {
         g.all_to_all_single(rows(2), rows(2), {}, {-1, 3}).wait();
       },
       "input_splits holds -1, which is negative"},
      {[&](auto& g) {
         g.all_to_all_single(rows(2), rows(2), {}, {kMost, kMost}).wait();
       },
       "input_splits do not add up to the 2 rows"},
      {[&](auto& g) {
         g.all_to_all_single(rows(2), rows(2), {1, 0}, {}).wait();
       },
       "output_splits do not add up to the 2 rows"},
      {[&](auto& g) {
         g.all_to_all_single(torch::zeros({2, 3}), rows(2)).wait();
       },
       "the rows of input have the shape [2], those of output [3]"},
      {[&](auto& g) {
         g.all_to_all_single(rows(3), rows(3), {2, 1}, {1, 2}).wait();
       },
       "this rank's own part has"},
      {[&](auto& g) { g.all_to_all_single(torch::zeros({}), rows(2)).wait(); },
       "output has no dimension to divide"},
      {[&](auto& g) { g.all_to_all_single(rows(2), rows(2).to(at::kInt)).wait(); }, "dtype"},
      {[&](auto& g) {
         const auto both = rows(4);
         g.all_to_all_single(both.narrow(0, 0, 2), both.narrow(0, 1, 2)).wait();
       },
       "share memory"},
  };
  on_ranks(2, [&](ProcessGroup& group) {
    for (const Wrong& one : wrong) {
      const Error error = error_of([&] { one.call(group); });
      EXPECT_EQ(error.blame(), Blame::Caller) << one.text;
      EXPECT_NE(std::string(error.what()).find(one.text), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("all_to_all_single"), std::string::npos)
          << error.what();
    }
    group.barrier().wait();  // nothing was issued
  });
}

TEST_P(AllToAllSingle, RaisesTheOutputsVersion) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto output = torch::zeros({2});
    const auto before = output._version();
    group.all_to_all_single(output, torch::ones({2})).wait();
    EXPECT_GT(output._version(), before);
  });
}

}  // namespace
}  // namespace weft
