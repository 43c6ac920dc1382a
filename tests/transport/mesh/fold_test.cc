// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <gmock/gmock.h>

#include <weft/kernels/kernels.h>
#include <weft/tests/harness/elements.h>
#include <weft/transport/mesh/fold.h>

namespace weft::transport::mesh {
namespace {

// Folds the numbers of all ranks as rank `own` does, in place or not.
std::vector<std::byte> folded(Dtype dtype, ReduceOp op,
                              const std::vector<std::vector<double>>& numbers, std::uint32_t own,
                              bool in_place) {
  const std::size_t count = numbers[0].size();
  std::vector<std::vector<std::byte>> memory;
  for (const auto& rank : numbers) {
    memory.emplace_back(count * size_of(dtype));
    for (std::size_t i = 0; i < count; ++i) harness::store(dtype, memory.back().data(), i, rank[i]);
  }
  std::vector<std::byte> out = memory[own];
  const auto before = memory;
  Scratch scratch;
  Fold fold({.own = in_place ? out.data() : memory[own].data(),
             .out = out.data(),
             .bytes = out.size(),
             .others = static_cast<std::uint32_t>(numbers.size() - 1),
             .own_position = own,
             .scale = op == ReduceOp::Avg ? 1.0 / static_cast<double>(numbers.size()) : 1});
  const Arithmetic arithmetic = arithmetic_of(dtype, op, static_cast<int>(numbers.size()));
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    if (rank == own) continue;
    auto message = memory[rank];
    fold.add(message.data(), arithmetic, scratch);
    std::fill(message.begin(), message.end(),
              std::byte{0xee});  // the message's memory is reused once it has been added
  }
  EXPECT_EQ(memory, before);
  return out;
}

TEST(Fold, GivesAllRanksTheSameBits) {
  constexpr std::size_t kCount = 5000;  // more than are widened at once
  for (const Dtype dtype : {Dtype::Float32, Dtype::Float64, Dtype::Float16, Dtype::BFloat16}) {
    for (const ReduceOp op :
         {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
      for (const std::size_t ranks : {2u, 3u, 4u, 7u}) {
        std::vector<std::vector<double>> numbers(ranks, std::vector<double>(kCount));
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          for (std::size_t i = 0; i < kCount; ++i) {
            // Include zeros of both signs: -0 and +0 are equal, but have different bits.
            numbers[rank][i] = i % 7 == 0 ? (rank % 2 == 0 ? -0.0 : 0.0)
                                          : std::sin(static_cast<double>(i * ranks + rank));
          }
        }
        const auto first = folded(dtype, op, numbers, 0, true);
        for (std::uint32_t own = 0; own < ranks; ++own) {
          for (const bool in_place : {true, false}) {
            ASSERT_EQ(folded(dtype, op, numbers, own, in_place), first)
                << name(dtype) << " " << name(op) << " of " << ranks << " ranks, rank " << own;
          }
        }
      }
    }
  }
}

TEST(Fold, RoundsSixteenBitFloatsOnce) {
  // Half of the last place, added three times: if each addition were rounded, it would have no
  // effect.
  const double half_a_place = std::ldexp(1.0, -9);
  const std::vector<std::vector<double>> numbers{
      {1}, {half_a_place}, {half_a_place}, {half_a_place}};
  const auto sum = folded(Dtype::BFloat16, ReduceOp::Sum, numbers, 0, true);
  EXPECT_EQ(harness::load(Dtype::BFloat16, sum.data(), 0), 1 + std::ldexp(1.0, -7));
}

TEST(Fold, AveragesWithoutHalfFloatOverflow) {
  const std::vector<std::vector<double>> numbers{{60000}, {60000}};
  const auto mean = folded(Dtype::Float16, ReduceOp::Avg, numbers, 1, true);
  EXPECT_EQ(harness::load(Dtype::Float16, mean.data(), 0), 60000);
}

TEST(Fold, AcceptsZeroElements) {
  EXPECT_TRUE(folded(Dtype::Float32, ReduceOp::Sum, {{}, {}, {}}, 2, true).empty());
}

}  // namespace
}  // namespace weft::transport::mesh
