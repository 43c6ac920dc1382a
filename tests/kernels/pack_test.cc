// SPDX-License-Identifier: Apache-2.0
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/kernels/kernels.h>

#include "tensors.h"

namespace weft::kernels {
namespace {

using testing::HasSubstr;

// Returns tensors of odd sizes, empty ones and single elements.
std::vector<at::Tensor> scattered(at::ScalarType type, int tensors) {
  std::mt19937 random(7);
  std::vector<at::Tensor> result;
  for (int i = 0; i < tensors; ++i) {
    const int kind = i % 5;
    const auto elements = kind == 0 ? 1 : kind == 1 ? 0 : static_cast<std::int64_t>(random() % 700);
    result.push_back(at::randn({elements}, at::kDouble).to(type));
  }
  return result;
}

class Pack : public testing::TestWithParam<Dtype> {};

TEST_P(Pack, EqualsCatScaleAndCast) {
  const Dtype from = GetParam();
  const auto tensors = scattered(scalar_type(from), 3000);
  const at::Tensor whole = at::cat(tensors);
  for (const Dtype to : kFloatTypes) {
    const double scale = from == to ? 1 : 0.1;
    const bool in_double = from == Dtype::Float64 || to == Dtype::Float64;
    const at::Tensor expected =
        (whole.to(in_double ? at::kDouble : at::kFloat) * scale).to(scalar_type(to));
    const at::Tensor flat = at::zeros(whole.sizes(), scalar_type(to));
    pack(slices_of(tensors), from, slice_of(flat), to, scale);
    SCOPED_TRACE("to " + std::string(name(to)));
    expect_same(flat, expected);
  }
}

TEST_P(Pack, UnpackRestoresTheTensors) {
  const Dtype from = GetParam();
  const auto tensors = scattered(scalar_type(from), 300);
  for (const Dtype to : kFloatTypes) {
    const at::Tensor flat = at::zeros(at::cat(tensors).sizes(), scalar_type(to));
    pack(slices_of(tensors), from, slice_of(flat), to, 4);
    std::vector<at::Tensor> back;
    for (const at::Tensor& tensor : tensors)
      back.push_back(at::zeros(tensor.sizes(), tensor.scalar_type()));
    unpack(slice_of(flat), to, slices_of(back), from, 0.25);
    // Values are rounded to the flat buffer's type and back; scaling by powers of two loses
    // nothing.
    const at::Tensor expected =
        (at::cat(tensors).to(at::kDouble) * 4).to(scalar_type(to)).to(at::kDouble) * 0.25;
    SCOPED_TRACE("by way of " + std::string(name(to)));
    expect_same(at::cat(back), expected.to(scalar_type(from)));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Pack, testing::ValuesIn(kFloatTypes), case_name);

TEST(PackBuffer, MayStartAnywhereAndKeepsTheRest) {
  const auto tensors = scattered(at::kFloat, 20);
  const at::Tensor whole = at::cat(tensors);
  for (const std::size_t skipped : {1, 2, 3, 5, 7}) {
    const at::Tensor flat = at::zeros({whole.numel() + 16}, at::kHalf).fill_(-1);
    const std::size_t bytes = skipped * sizeof(std::uint16_t);
    pack(slices_of(tensors), Dtype::Float32, slice_of(flat).part(bytes, flat.nbytes() - bytes),
         Dtype::Float16, 2);
    const auto first = static_cast<std::int64_t>(skipped);
    expect_same(flat.slice(0, first, first + whole.numel()), (whole * 2).to(at::kHalf));
    expect_same(flat.slice(0, 0, first), at::zeros({first}, at::kHalf).fill_(-1));
    const std::int64_t rest = 16 - first;
    expect_same(flat.slice(0, first + whole.numel()), at::zeros({rest}, at::kHalf).fill_(-1));
  }
}

TEST(PackBuffer, AcceptsEmptyInput) {
  const at::Tensor flat = at::zeros({3}, at::kFloat);
  pack({}, Dtype::Float32, slice_of(flat), Dtype::Float32);
  unpack(Slice(), Dtype::Float32, {}, Dtype::Float16, 2);
  const std::vector<Slice> empty(4);
  pack(empty, Dtype::Float32, Slice(), Dtype::BFloat16);
  expect_same(flat, at::zeros({3}, at::kFloat));
}

TEST(PackBuffer, SlotsMayHaveGaps) {
  const std::vector<at::Tensor> tensors = {at::randn({3}), at::randn({5})};
  const at::Tensor flat = at::zeros({16}, at::kFloat);
  const std::vector<Slice> slots = {slice_of(flat).part(0, 12), slice_of(flat).part(32, 20)};
  cast(slices_of(tensors), Dtype::Float32, slots, Dtype::Float32, 0.5);
  expect_same(flat.slice(0, 0, 3), tensors[0] * 0.5);
  expect_same(flat.slice(0, 8, 13), tensors[1] * 0.5);
  expect_same(flat.slice(0, 3, 8), at::zeros({5}, at::kFloat));
}

class PackRefuses : public testing::Test {
 protected:
  std::string refusal(std::vector<Slice> from, Slice to) {
    try {
      pack(from, Dtype::Float32, to, Dtype::Float16, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      expect_same(flat_, at::zeros({8}, at::kHalf));  // refused before the first byte
      return error.text();
    }
    return "";
  }
  at::Tensor values_ = at::randn({4}, at::kFloat);
  at::Tensor flat_ = at::zeros({8}, at::kHalf);
};

TEST_F(PackRefuses, TooSmallBuffer) {
  EXPECT_THAT(refusal({slice_of(values_), slice_of(values_)}, slice_of(flat_).part(0, 14)),
              HasSubstr("pack: the slices have 8 elements, the flat buffer has 7 of float16"));
}

TEST_F(PackRefuses, PartsOfElements) {
  EXPECT_THAT(refusal({slice_of(values_), slice_of(values_).part(0, 6)}, slice_of(flat_)),
              HasSubstr("slice 1 has 6 bytes, not a whole number of float32 elements"));
  EXPECT_THAT(refusal({slice_of(values_).part(2, 8)}, slice_of(flat_)),
              HasSubstr("slice 0 is not aligned to an element"));
}

TEST_F(PackRefuses, MemoryOfAnotherDevice) {
  Slice elsewhere = slice_of(values_);
  elsewhere.device = Device::cuda(1);
  EXPECT_THAT(refusal({slice_of(values_), elsewhere}, slice_of(flat_)),
              HasSubstr("slice 1 lies on cuda:1; this call takes memory of cpu"));
}

TEST_F(PackRefuses, MissingMemory) {
  EXPECT_THAT(refusal({Slice{nullptr, 8, Device::host()}}, slice_of(flat_)),
              HasSubstr("has no address"));
}

TEST_F(PackRefuses, UnequalPairs) {
  const Slice a = slice_of(values_);
  const Slice b = a.part(0, 8);
  EXPECT_THROW(cast({&a, 1}, Dtype::Float32, {&b, 1}, Dtype::Float32), Error);
  EXPECT_THROW(cast({&a, 1}, Dtype::Float32, {}, Dtype::Float32), Error);
}

}  // namespace
}  // namespace weft::kernels
