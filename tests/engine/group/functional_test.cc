// SPDX-License-Identifier: Apache-2.0
// Collectives that autograd differentiates: values and gradients are compared with their closed
// forms. Rank r's input is r + 1 everywhere. Its loss is the sum of sin(result) times a weight of
// its own, so that ranks differ.
#include <gtest/gtest.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <weft/functional.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;

constexpr int kRanks = 3;
constexpr int kRoot = 1;

double weight(int rank) { return 2.0 * rank + 1; }

class Functional : public testing::TestWithParam<const char*> {
 protected:
  static void on_ranks(const harness::Body& body) {
    harness::run_ranks(As::Threads, kRanks, body, {.backend = GetParam()});
  }
  static at::Tensor input(const ProcessGroup& group, double more = 0) {
    return torch::full({2, 3}, group.rank() + 1 + more, at::kDouble).requires_grad_();
  }
  static at::Tensor loss(const at::Tensor& result, const ProcessGroup& group) {
    return result.sin().sum() * weight(group.rank());
  }
  // Derivative of the loss of `rank` by the result, where the result is `value`.
  static double slope(double value, int rank) { return std::cos(value) * weight(rank); }
  static void expect_all(const at::Tensor& tensor, double value) {
    ASSERT_TRUE(tensor.defined());
    EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{2, 3}));
    EXPECT_LT((tensor - value).abs().max().item<double>(), 1e-12) << tensor << " is not " << value;
  }
  // Sum of all ranks' slopes where the result is `value`.
  static double slopes(double value) {
    double sum = 0;
    for (int rank = 0; rank < kRanks; ++rank) sum += slope(value, rank);
    return sum;
  }
  static constexpr double kSum = 1 + 2 + 3;
};

TEST_P(Functional, BroadcastSumsGradientsAtRoot) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    const auto y = functional::broadcast(x, kRoot, group);
    expect_all(y, kRoot + 1);
    expect_all(x, group.rank() + 1);
    loss(y, group).backward();
    expect_all(x.grad(), group.rank() == kRoot ? slopes(kRoot + 1) : 0);
  });
}

TEST_P(Functional, ReduceReturnsTheRootsGradient) {
  on_ranks([](ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg}) {
      const double share = op == ReduceOp::Avg ? 1.0 / kRanks : 1;
      const auto x = input(group);
      const auto y = functional::reduce(x, kRoot, group, op);
      expect_all(y, group.rank() == kRoot ? kSum * share : 0);
      loss(y, group).backward();
      expect_all(x.grad(), slope(kSum * share, kRoot) * share);
    }
  });
}

TEST_P(Functional, AllReduceSumsGradients) {
  on_ranks([](ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg}) {
      const double share = op == ReduceOp::Avg ? 1.0 / kRanks : 1;
      const auto x = input(group);
      const auto y = functional::all_reduce(x, group, op);
      expect_all(y, kSum * share);
      expect_all(x, group.rank() + 1);
      loss(y, group).backward();
      expect_all(x.grad(), slopes(kSum * share) * share);
    }
  });
}

TEST_P(Functional, AllGatherSumsGradientsOfEachPart) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    const auto y = functional::all_gather(x, group);
    ASSERT_EQ(y.size(), kRanks);
    for (int rank = 0; rank < kRanks; ++rank)
      expect_all(y[static_cast<std::size_t>(rank)], rank + 1);
    loss(at::stack(y), group).backward();
    expect_all(x.grad(), slopes(group.rank() + 1));
  });
}

TEST_P(Functional, GatherReturnsTheRootsGradients) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    const auto y = functional::gather(x, kRoot, group);
    ASSERT_EQ(y.size(), kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      expect_all(y[static_cast<std::size_t>(rank)], group.rank() == kRoot ? rank + 1 : 0);
    }
    loss(at::stack(y), group).backward();
    expect_all(x.grad(), slope(group.rank() + 1, kRoot));
  });
}

TEST_P(Functional, ScatterGathersGradientsAtRoot) {
  on_ranks([](ProcessGroup& group) {
    std::vector<at::Tensor> x;
    for (int rank = 0; rank < kRanks; ++rank) x.push_back(input(group, rank));
    const auto y = functional::scatter(x, kRoot, group);
    expect_all(y, kRoot + 1 + group.rank());
    loss(y, group).backward();
    for (int rank = 0; rank < kRanks; ++rank) {
      expect_all(x[static_cast<std::size_t>(rank)].grad(),
                 group.rank() == kRoot ? slope(kRoot + 1 + rank, rank) : 0);
    }
  });
}

TEST_P(Functional, ReduceScatterGathersGradients) {
  on_ranks([](ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg}) {
      const double share = op == ReduceOp::Avg ? 1.0 / kRanks : 1;
      std::vector<at::Tensor> x;
      for (int rank = 0; rank < kRanks; ++rank) x.push_back(input(group, rank));
      const auto y = functional::reduce_scatter(x, group, op);
      expect_all(y, (kSum + kRanks * group.rank()) * share);
      loss(y, group).backward();
      for (int rank = 0; rank < kRanks; ++rank) {
        expect_all(x[static_cast<std::size_t>(rank)].grad(),
                   slope((kSum + kRanks * rank) * share, rank) * share);
      }
    }
  });
}

TEST_P(Functional, AllToAllTransposesGradients) {
  on_ranks([](ProcessGroup& group) {
    std::vector<at::Tensor> x;
    for (int rank = 0; rank < kRanks; ++rank) x.push_back(input(group, 10 * rank));
    const auto y = functional::all_to_all(x, group);
    ASSERT_EQ(y.size(), kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      expect_all(y[static_cast<std::size_t>(rank)], rank + 1 + 10 * group.rank());
    }
    loss(at::stack(y), group).backward();
    for (int rank = 0; rank < kRanks; ++rank) {
      expect_all(x[static_cast<std::size_t>(rank)].grad(),
                 slope(group.rank() + 1 + 10 * rank, rank));
    }
  });
}

// The cube of a sum s has the gradient 3 s^2 and the second derivative 6 s, once for each rank's
// loss.
TEST_P(Functional, BackwardCanBeDifferentiatedAgain) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    const auto y = functional::all_reduce(x, group).pow(3).sum();
    const at::Tensor first =
        torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    expect_all(first, kRanks * 3 * kSum * kSum);
    first.sum().backward();
    expect_all(x.grad(), kRanks * kRanks * 6 * kSum);
  });
}

// Only the root needs a gradient, and only another rank's loss depends on its input; all ranks take
// part nevertheless.
TEST_P(Functional, AllRanksTakePartInTheBackward) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group).detach().requires_grad_(group.rank() == kRoot);
    const auto y = functional::broadcast(x, kRoot, group);
    EXPECT_TRUE(y.requires_grad());
    (group.rank() == 2 ? loss(y, group) : 0 * y.sum()).backward();
    if (group.rank() == kRoot) expect_all(x.grad(), slope(kRoot + 1, 2));
    EXPECT_EQ(x.grad().defined(), group.rank() == kRoot);
  });
}

// No loss uses some of the results. Gradients arrive as expanded views, and the input is
// transposed.
TEST_P(Functional, UnusedResultsAddNoGradient) {
  on_ranks([](ProcessGroup& group) {
    const auto x = torch::full({3, 2}, group.rank() + 1, at::kDouble).requires_grad_();
    const auto y = functional::all_gather(x.t(), group);
    y[0].sum().backward();
    ASSERT_EQ(x.grad().sizes(), x.sizes());
    expect_all(x.grad().t(), group.rank() == 0 ? kRanks : 0);
  });
}

TEST_P(Functional, IsAPlainCollectiveWithoutGradients) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    {
      const torch::NoGradGuard none;
      EXPECT_FALSE(functional::all_reduce(x, group).requires_grad());
    }
    const auto whole = functional::all_reduce(torch::full({2, 3}, 2, at::kLong), group);
    EXPECT_FALSE(whole.requires_grad());
    EXPECT_EQ(whole[0][0].item<std::int64_t>(), 2 * kRanks);
  });
}

TEST_P(Functional, ConjugatesKeepTheirValues) {
  on_ranks([](ProcessGroup& group) {
    const auto x = torch::full({2}, c10::complex<double>(1, group.rank()), at::kComplexDouble)
                       .requires_grad_();
    const auto y = functional::all_reduce(x.conj(), group);
    EXPECT_EQ(y[0].item<c10::complex<double>>(), c10::complex<double>(3, -3));
    torch::real(y * torch::full({2}, c10::complex<double>(0, 1), at::kComplexDouble))
        .sum()
        .backward();
    EXPECT_EQ(x.grad()[0].item<c10::complex<double>>(), c10::complex<double>(0, kRanks));
  });
}

TEST_P(Functional, RefusesCallsWithoutAGradient) {
  on_ranks([](ProcessGroup& group) {
    const auto x = input(group);
    const auto expect = [](const Error& error, const char* text) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
    };
    expect(error_of([&] { functional::all_reduce(x, group, ReduceOp::Max); }),
           "functional::all_reduce: Max has no gradient here; use Sum or Avg");
    expect(error_of([&] { functional::scatter({x}, kRoot, group); }),
           "1 tensor is given; it takes one for each of the 3 ranks");
    expect(error_of([&] {
             functional::all_to_all({x, x, torch::ones({1})}, group);
           }),
           "must be alike");
    expect(error_of([&] { functional::broadcast(x, 3, group); }), "3 is not a rank");
    expect(error_of([&] { functional::all_gather(at::Tensor(), group); }), "undefined");
    expect(error_of([&] { functional::all_reduce(torch::eye(2).to_sparse(), group); }), "sparse");
  });
}

INSTANTIATE_TEST_SUITE_P(Group, Functional, testing::Values("gloo", "tcp", "shm", "inproc"));

}  // namespace
}  // namespace weft
