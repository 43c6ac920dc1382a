// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <weft/engine/group/sparse_sum.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// The numbers that each rank announces about its tensor.
enum Word : std::int64_t { kEntries, kScalarType, kSparseDims, kDims, kShape, kWords };

// A hash of the sizes, for comparison between ranks.
std::int64_t digest(at::IntArrayRef sizes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::int64_t size : sizes) {
    hash = (hash ^ static_cast<std::uint64_t>(size)) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return static_cast<std::int64_t>(hash);
}

// The number of different indices.
std::int64_t most_entries(const at::Tensor& tensor) {
  std::int64_t most = 1;
  for (const std::int64_t size :
       tensor.sizes().slice(0, static_cast<std::size_t>(tensor.sparse_dim()))) {
    if (size > 0 && most > std::numeric_limits<std::int64_t>::max() / size)
      return std::numeric_limits<std::int64_t>::max();
    most *= size;
  }
  return most;
}

}  // namespace

SparseSum::SparseSum(ProcessGroup group, const at::Tensor& own) : group_(std::move(group)) {
  own_ = own.detach().coalesce();
  const std::vector<std::int64_t> said = {own_._nnz(),
                                          static_cast<std::int64_t>(own_.scalar_type()),
                                          own_.sparse_dim(), own_.dim(), digest(own_.sizes())};
  announced_ =
      at::zeros({group_.size(), kWords}, at::TensorOptions(at::kLong).device(own_.device()));
  announcing_ = group_.all_gather_into(announced_, at::tensor(said, at::kLong).to(own_.device()));
}

void SparseSum::check_announced(const at::Tensor& all) const {
  const auto said = all.accessor<std::int64_t, 2>();
  const int own = group_.rank();
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto differs = [&](Word word) { return said[rank][word] != said[own][word]; };
    const char* what = differs(kScalarType)                ? "dtype"
                       : differs(kDims) || differs(kShape) ? "shape"
                       : differs(kSparseDims)              ? "number of sparse dimensions"
                                                           : nullptr;
    const std::string whose = "all_reduce of sparse tensors: rank " + std::to_string(rank);
    if (what) {
      throw Error(Blame::Caller, whose + " passed a tensor of another " + what +
                                     " than this rank, which passed " + tensor::describe(own_) +
                                     " with " + std::to_string(own_.sparse_dim()) +
                                     " sparse dimensions");
    }
    if (said[rank][kEntries] < 0 || said[rank][kEntries] > most_entries(own_)) {
      throw Error(Blame::PeerLost, whose + " announced " + std::to_string(said[rank][kEntries]) +
                                       " entries of a tensor that has at most " +
                                       std::to_string(most_entries(own_)));
    }
  }
}

// mine: [entries, …]. Returns the entries of all ranks, one after the other. They travel padded to
// the greatest number of entries of a rank.
at::Tensor SparseSum::gathered(const at::Tensor& mine, const at::Tensor& entries) {
  const std::int64_t most = entries.max().item<std::int64_t>();
  auto shape = mine.sizes().vec();
  shape[0] = most;
  at::Tensor padded = at::zeros(shape, mine.options());
  padded.narrow(0, 0, mine.size(0)).copy_(mine);
  shape[0] = most * group_.size();
  at::Tensor all = at::empty(shape, mine.options());
  group_.all_gather_into(all, padded).wait();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group_.size(); ++rank) {
    parts.push_back(all.narrow(0, rank * most, entries[rank].item<std::int64_t>()));
  }
  return at::cat(parts);
}

at::Tensor SparseSum::finish() {
  announcing_.wait();
  const at::Tensor all = announced_.to(at::kCPU);
  check_announced(all);
  const at::Tensor entries = all.select(1, kEntries);
  if (entries.max().item<std::int64_t>() == 0) return own_;
  const at::Tensor indices = gathered(own_._indices().t().contiguous(), entries).t().contiguous();
  const at::Tensor values = gathered(own_._values().contiguous(), entries);
  at::_validate_sparse_coo_tensor_args(indices, values, own_.sizes());
  return at::sparse_coo_tensor(indices, values, own_.sizes(), own_.options()).coalesce();
}

}  // namespace weft::group
