// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/data.h>
#include <torch/serialize.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(DistributedSampler, DealsOutAllAndRepeatsToFillUp) {
  std::multiset<std::int64_t> seen;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const DistributedSampler sampler(10, 3, rank);
    EXPECT_EQ(sampler.size(), 4u);
    seen.insert(sampler.indices().begin(), sampler.indices().end());
  }
  EXPECT_EQ(seen.size(), 12u);
  for (std::int64_t i = 0; i < 10; ++i) EXPECT_GE(seen.count(i), 1u) << i;
}

TEST(DistributedSampler, DropsTheRestWhenAsked) {
  std::set<std::int64_t> seen;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const DistributedSampler sampler(11, 3, rank, {.drop_last = true});
    EXPECT_EQ(sampler.size(), 3u);
    seen.insert(sampler.indices().begin(), sampler.indices().end());
  }
  EXPECT_EQ(seen.size(), 9u);
}

TEST(DistributedSampler, UnshuffledRanksTakeTurns) {
  EXPECT_THAT(DistributedSampler(7, 2, 1, {.shuffle = false}).indices(), ElementsAre(1, 3, 5, 0));
}

// The expected order is that of torch.utils.data.DistributedSampler(range(10), num_replicas=2,
// rank=0 / 1, shuffle=True, seed=3) after set_epoch(2), torch 2.11.
TEST(DistributedSampler, MatchesPythonsOrder) {
  DistributedSampler zero(10, 2, 0, {.seed = 3});
  DistributedSampler one(10, 2, 1, {.seed = 3});
  zero.set_epoch(2);
  one.set_epoch(2);
  EXPECT_THAT(zero.indices(), ElementsAre(1, 9, 3, 0, 8));
  EXPECT_THAT(one.indices(), ElementsAre(4, 6, 5, 2, 7));
}

TEST(DistributedSampler, EpochChangesTheOrder) {
  DistributedSampler sampler(100, 2, 0);
  const auto first = sampler.indices();
  sampler.set_epoch(1);
  EXPECT_NE(sampler.indices(), first);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.indices(), first);
}

TEST(DistributedSampler, IsALibtorchSampler) {
  DistributedSampler sampler(5, 1, 0, {.shuffle = false});
  EXPECT_THAT(*sampler.next(3), ElementsAre(0, 1, 2));
  EXPECT_THAT(*sampler.next(3), ElementsAre(3, 4));
  EXPECT_FALSE(sampler.next(3));
  sampler.reset();
  EXPECT_THAT(*sampler.next(1), ElementsAre(0));
  std::stringstream stream;
  torch::save(sampler, stream);
  DistributedSampler restored(5, 1, 0, {.shuffle = false});
  torch::load(restored, stream);
  EXPECT_THAT(*restored.next(1), ElementsAre(1));
}

struct Numbers : torch::data::datasets::Dataset<Numbers, std::int64_t> {
  std::int64_t get(std::size_t index) override { return static_cast<std::int64_t>(index); }
  std::optional<std::size_t> size() const override { return 100; }
};

TEST(DistributedSampler, DataLoaderFollowsSamplerEpochs) {
  DistributedSampler sampler(100, 2, 1);
  const auto loader =
      torch::data::make_data_loader(Numbers(), sampler, torch::data::DataLoaderOptions(7));
  for (const std::size_t epoch : {0u, 1u, 2u}) {
    sampler.set_epoch(epoch);
    std::vector<std::int64_t> seen;
    for (const auto& batch : *loader) seen.insert(seen.end(), batch.begin(), batch.end());
    EXPECT_EQ(seen, sampler.indices()) << "epoch " << epoch;
  }
}

TEST(DistributedSampler, LeadsTheLoaderThatItWasMovedInto) {
  DistributedSampler sampler(100, 2, 1);
  const auto loader = torch::data::make_data_loader(Numbers(), std::move(sampler),
                                                    torch::data::DataLoaderOptions(7));
  // NOLINTBEGIN(bugprone-use-after-move)
  for (const std::size_t epoch : {0u, 1u}) {
    sampler.set_epoch(epoch);
    std::vector<std::int64_t> seen;
    for (const auto& batch : *loader) seen.insert(seen.end(), batch.begin(), batch.end());
    EXPECT_EQ(seen, sampler.indices()) << "epoch " << epoch;
  }
  // NOLINTEND(bugprone-use-after-move)
}

TEST(DistributedSampler, RankOutsideIsACallerError) {
  for (const std::size_t ranks : {2u, 0u}) {
    const Error error = harness::error_of([&] { DistributedSampler(10, ranks, ranks); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("numbered from 0"));
  }
  EXPECT_EQ(DistributedSampler(0, 2, 1).size(), 0u);
}

TEST(DataPartitioner, PartsAreDisjointAndOfGivenSizes) {
  const DataPartitioner parts(101, {0.7, 0.2, 0.1}, 1234);
  EXPECT_EQ(parts.use(0).size(), 70u);
  EXPECT_EQ(parts.use(1).size(), 20u);
  EXPECT_EQ(parts.use(2).size(), 10u);
  std::set<std::int64_t> seen;
  for (int part = 0; part < 3; ++part) seen.insert(parts.use(part).begin(), parts.use(part).end());
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(DataPartitioner(101, {0.7, 0.2, 0.1}, 1234).use(1), parts.use(1));
  EXPECT_NE(DataPartitioner(101, {0.7, 0.2, 0.1}, 1).use(1), parts.use(1));
}

TEST(DataPartitioner, RefusesWrongFractionsAndParts) {
  const auto text_of = [](const std::function<void()>& call) {
    const Error error = harness::error_of(call);
    EXPECT_EQ(error.blame(), Blame::Caller);
    return error.text();
  };
  EXPECT_THAT(text_of([] { DataPartitioner(10, {0.7, 0.4}); }), HasSubstr("which is over 1"));
  for (const double none : {-0.1, std::nan("")}) {
    EXPECT_THAT(text_of([&] { DataPartitioner(10, {none}); }), HasSubstr("is not a fraction"));
  }
  for (const int part : {1, -1}) {
    EXPECT_THAT(text_of([&] { DataPartitioner(10, {1.0}).use(part); }),
                HasSubstr("numbered from 0"));
  }
}

}  // namespace
}  // namespace weft::testing
