// SPDX-License-Identifier: Apache-2.0
// Sparse tensors, whose indices and values libtorch does not check.
#include <filesystem>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include <weft/tests/engine/codec/kept.h>

namespace weft {
namespace {

TEST(Codec, KeepsSparseTensors) {
  const auto indices = at::tensor({0, 1, 1, 2, 0, 0}, at::kLong).reshape({2, 3});
  const auto coo = at::sparse_coo_tensor(indices, at::tensor({1.0, 2.0, 3.0}), {3, 3});
  expect_same(there_and_back(coo), coo);
  EXPECT_FALSE(there_and_back(coo).is_coalesced());
  EXPECT_TRUE(there_and_back(coo.coalesce()).is_coalesced());
  const auto dense = at::eye(4) * 2;
  expect_same(there_and_back(dense.to_sparse_csr()), dense.to_sparse_csr());
  expect_same(there_and_back(dense.to_sparse_csc()), dense.to_sparse_csc());
  expect_same(there_and_back(dense.to_sparse_bsr({2, 2})), dense.to_sparse_bsr({2, 2}));
}

// A peer's bytes may hold such tensors, and libtorch would not check them.
TEST(Codec, CooIndicesMustBeInRangeAndOrder) {
  const auto unchecked = [](const at::Tensor& indices, const at::Tensor& values,
                            at::IntArrayRef sizes, bool coalesced) {
    return encode(at::_sparse_coo_tensor_unsafe(indices, values, sizes)._coalesced_(coalesced));
  };
  const auto blame_of = [](const std::vector<std::byte>& bytes) -> std::optional<Blame> {
    try {
      decode<at::Tensor>(bytes);
      return std::nullopt;
    } catch (const Error& error) {
      return error.blame();
    }
  };
  const auto at = [](std::vector<std::int64_t> rows, std::vector<std::int64_t> columns) {
    return at::stack({at::tensor(rows, at::kLong), at::tensor(columns, at::kLong)});
  };
  const auto two = at::ones({2}), three = at::ones({3});
  EXPECT_EQ(blame_of(unchecked(at({0, 1, 2}, {0, 3, 1}), three, {3, 4}, false)), std::nullopt);
  EXPECT_EQ(blame_of(unchecked(at({0, 1, 3}, {0, 3, 1}), three, {3, 4}, false)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at({0, 1, 2}, {0, 4, 1}), three, {3, 4}, false)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at({0, -1, 2}, {0, 3, 1}), three, {3, 4}, false)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at({0, 0, 2}, {0, 3, 1}), three, {3, 4}, true)), std::nullopt);
  EXPECT_EQ(blame_of(unchecked(at({0, 0, 2}, {3, 0, 1}), three, {3, 4}, true)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at({0, 2, 2}, {3, 1, 1}), three, {3, 4}, true)), Blame::Caller);
  // Several entries in one place, no sparse dimensions, no entries.
  const auto one = at({1}, {2}).expand({2, 2});
  EXPECT_EQ(blame_of(unchecked(one, two, {3, 4}, false)), std::nullopt);
  EXPECT_EQ(blame_of(unchecked(one, two, {3, 2}, false)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(one, two, {3, 4}, true)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at::empty({0, 2}, at::kLong), two, {}, false)), std::nullopt);
  EXPECT_EQ(blame_of(unchecked(at::empty({0, 2}, at::kLong), two, {}, true)), Blame::Caller);
  EXPECT_EQ(blame_of(unchecked(at::empty({2, 0}, at::kLong), at::empty({0, 5}), {3, 4, 5}, true)),
            std::nullopt);
}

// Where threads outnumber processors, libtorch's threads wait long for each other.
TEST(Codec, ReadingCooStartsNoThreads) {
  const auto threads = [] {
    const std::filesystem::directory_iterator all("/proc/self/task");
    return std::distance(begin(all), end(all));
  };
  const auto coalesced = (at::eye(50) * 2).to_sparse();
  const auto bytes = {encode(coalesced), encode(at::cat({coalesced, coalesced}))};
  // A thread that has run nothing in parallel has started no others yet.
  std::thread([&] {
    const int before = at::get_num_threads();
    at::set_num_threads(4);
    const auto at_first = threads();
    for (const auto& one : bytes) decode<at::Tensor>(one);
    EXPECT_EQ(threads(), at_first);
    at::set_num_threads(before);
  }).join();
}

// libtorch reads the values as if they were contiguous.
TEST(Codec, CompressedValuesAreContiguous) {
  const auto rows = at::arange(4), columns = at::zeros({3}, at::kLong);
  for (const auto& values :
       {at::ones({1}).expand({3}), at::arange(6, at::kFloat).slice(0, 0, 6, 2)}) {
    const auto sent =
        at::sparse_csr_tensor(rows, columns, values, {3, 1}, at::TensorOptions(at::kSparseCsr));
    const auto got = there_and_back(sent);
    EXPECT_TRUE(got.values().is_contiguous());
    EXPECT_TRUE(at::equal(got.sum(1, true).to_dense().flatten(), values));
  }
}

// A write to another tensor of the message must not change validated indices.
TEST(Codec, SparseIndicesOwnTheirMemory) {
  const auto indices = at::zeros({1, 2}, at::kLong);
  const auto sent = std::pair(indices, at::sparse_coo_tensor(indices, at::ones({2}), {4}));
  auto got = there_and_back(sent);
  got.first.fill_(std::int64_t{1} << 40);
  EXPECT_TRUE(at::equal(got.second._indices(), at::zeros({1, 2}, at::kLong)));
}

}  // namespace
}  // namespace weft
