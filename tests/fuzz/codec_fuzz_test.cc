// SPDX-License-Identifier: Apache-2.0
// The corpus consists of encoded values (weft::encode).
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <weft/engine/codec/codec.h>
#include <weft/tests/fuzz/expect_corpus.h>

namespace weft {
namespace {

using Bytes = std::vector<std::byte>;

Bytes with_type(std::uint8_t type, const Bytes& encoded) {
  Bytes input(1 + encoded.size());
  input[0] = std::byte{type};
  std::copy(encoded.begin(), encoded.end(), input.begin() + 1);
  return input;
}

struct Record {
  std::string name;
  std::map<std::string, std::vector<at::Tensor>> tensors;
  std::optional<double> number;
  WEFT_FIELDS(name, tensors, number)
};
using Choice = std::variant<std::int64_t, std::string, at::Tensor, std::vector<double>>;

std::map<std::string, Bytes> encoded_corpus() {
  const auto base = at::arange(24, at::kFloat).reshape({4, 6});
  const auto indices = at::arange(3, at::kLong).repeat({2, 1});
  const auto coo = at::sparse_coo_tensor(indices, at::ones({3}), {3, 4});
  std::map<std::string, Bytes> all;
  all["dense"] = with_type(0, encode(base.t().slice(0, 1, 5, 2)));
  all["gradient"] = with_type(0, encode(at::ones({2}).requires_grad_()));
  all["empty"] = with_type(0, encode(at::empty({3, 0})));
  all["undefined"] = with_type(0, encode(at::Tensor()));
  all["coo"] = with_type(0, encode(coo));
  all["coalesced"] = with_type(0, encode(coo.coalesce()));
  all["csr"] = with_type(0, encode(at::eye(4).to_sparse_csr()));
  all["csc"] = with_type(0, encode(at::eye(4).to_sparse_csc()));
  all["bsr"] = with_type(0, encode(at::eye(4).to_sparse_bsr({2, 2})));
  all["shared"] = with_type(1, encode(std::vector<at::Tensor>{base, base.t(), base.select(0, 2),
                                                              at::ones({2}, at::kByte)}));
  all["record"] = with_type(2, encode(Record{"name", {{"a", {base, coo}}, {"b", {}}}, 0.5}));
  all["variant"] = with_type(3, encode(Choice(at::ones({2}))));
  all["text"] = with_type(3, encode(Choice("text")));
  all["scalars"] =
      with_type(4, encode(std::vector<c10::Scalar>{1, 0.5, true, c10::complex<double>(1, 2)}));
  all["durations"] =
      with_type(5, encode(std::map<std::int64_t, std::optional<std::chrono::milliseconds>>{
                       {1, std::chrono::milliseconds(5)}, {-2, std::nullopt}}));
  return all;
}

TEST(CodecFuzz, CorpusIsWhatEncodeWrites) { fuzz::expect_corpus(encoded_corpus()); }

}  // namespace
}  // namespace weft
