// SPDX-License-Identifier: Apache-2.0
// Sums of sparse tensors.
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;

class SparseSums : public testing::TestWithParam<As> {
 protected:
  static void on_ranks(int ranks, const harness::Body& body) {
    harness::run_ranks(GetParam(), ranks, body);
  }
};

INSTANTIATE_TEST_SUITE_P(, SparseSums, testing::Values(As::Threads, As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// Rank r has an entry with value r + 1 in each of the rows 0 … r, and a second one in row 0.
at::Tensor rows_of(int rank, at::ScalarType dtype = at::kFloat) {
  auto rows = torch::cat({torch::zeros({1}, at::kLong), torch::arange(rank + 1)}).unsqueeze(0);
  const auto values = torch::full({rank + 2, 3}, rank + 1).to(dtype);
  return torch::sparse_coo_tensor(rows, values, {8, 3});
}

at::Tensor sum_of_rows(int ranks, at::ScalarType dtype = at::kFloat) {
  auto sum = torch::zeros({8, 3}, dtype);
  for (int rank = 0; rank < ranks; ++rank) sum += rows_of(rank, dtype).to_dense();
  return sum;
}

TEST_P(SparseSums, AreCoalescedAndInPlace) {
  on_ranks(4, [](ProcessGroup& group) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kInt, at::kLong}) {
      const auto mine = rows_of(group.rank(), dtype);
      const Work work = group.all_reduce(mine);
      EXPECT_TRUE(work.query());
      EXPECT_TRUE(mine.is_coalesced());
      EXPECT_EQ(mine._nnz(), 4);
      EXPECT_EQ(mine.scalar_type(), dtype);
      EXPECT_TRUE(torch::equal(mine.to_dense(), sum_of_rows(4, dtype))) << dtype;
    }
  });
}

TEST_P(SparseSums, RanksMayHaveNoEntries) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto empty = torch::sparse_coo_tensor({8, 3}, at::TensorOptions(at::kFloat));
    const auto mine = group.rank() == 1 ? torch::eye(8, 3).to_sparse() : empty.clone();
    group.all_reduce(mine).wait();
    EXPECT_TRUE(torch::equal(mine.to_dense(), torch::eye(8, 3)));
    const auto nothing = empty.clone();
    group.all_reduce(nothing).wait();
    EXPECT_EQ(nothing._nnz(), 0);
  });
}

TEST_P(SparseSums, LeafIsSummedWithoutAGraph) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto mine = rows_of(group.rank()).requires_grad_();
    group.all_reduce(mine).wait();
    EXPECT_TRUE(mine.is_leaf());
    EXPECT_TRUE(mine.requires_grad());
    EXPECT_TRUE(torch::equal(mine.detach().to_dense(), sum_of_rows(2)));
  });
}

TEST_P(SparseSums, RefuseOtherOperatorsAndLayouts) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto mine = rows_of(group.rank());
    for (const auto op : {ReduceOp::Avg, ReduceOp::Max, ReduceOp::Product}) {
      EXPECT_EQ(error_of([&] { static_cast<void>(group.all_reduce(mine, op)); }).blame(),
                Blame::Unsupported);
    }
    EXPECT_EQ(error_of([&] { static_cast<void>(group.broadcast(mine, 0)); }).blame(),
              Blame::Caller);
    EXPECT_EQ(error_of([&] {
                static_cast<void>(group.all_reduce(torch::eye(3).to_sparse_csr()));
              }).blame(),
              Blame::Caller);
    group.all_reduce(mine).wait();  // nothing was sent
    EXPECT_TRUE(torch::equal(mine.to_dense(), sum_of_rows(2)));
  });
}

TEST_P(SparseSums, MismatchIsNamedOnEveryRank) {
  on_ranks(2, [](ProcessGroup& group) {
    const bool first = group.rank() == 0;
    const auto refused = [&](const at::Tensor& zeroth, const at::Tensor& other,
                             const std::string& what) {
      const Error error =
          error_of([&] { static_cast<void>(group.all_reduce(first ? zeroth : other)); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("rank " + std::to_string(first ? 1 : 0) +
                                  " passed a tensor of another " + what),
                std::string::npos)
          << error.text();
    };
    refused(torch::eye(4).to_sparse(), torch::eye(5).to_sparse(), "shape");
    refused(torch::eye(4).to_sparse(), torch::eye(4, at::kDouble).to_sparse(), "dtype");
    refused(torch::eye(4).to_sparse(1), torch::eye(4).to_sparse(2), "number of sparse dimensions");
    const auto mine = torch::eye(4).to_sparse();
    group.all_reduce(mine).wait();
    EXPECT_TRUE(torch::equal(mine.to_dense(), 2 * torch::eye(4)));
  });
}

}  // namespace
}  // namespace weft
