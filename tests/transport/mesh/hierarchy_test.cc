// SPDX-License-Identifier: Apache-2.0
// Tests the collectives in two levels: their plans give the same results as flat ones for every
// layout of ranks on hosts, and send over the network only what they must.
#include <bit>
#include <random>

#include <gmock/gmock.h>

#include <weft/tests/harness/elements.h>
#include <weft/tests/transport/mesh/plan_world.h>

namespace weft::transport::mesh {
namespace {

using Hosts = std::vector<std::uint32_t>;  // by rank

const Hosts kLayouts[] = {
    {0, 0, 1, 1},
    {0, 0, 0, 1, 1, 1},  // equal
    {0, 0, 0, 1},
    {1, 0, 0, 0},
    {0, 1, 2, 2},
    {0, 0, 1, 1, 1},  // unequal
    {0, 1, 0, 1},
    {0, 1, 1, 0, 2, 0},
    {5, 5, 2, 2, 9},  // not contiguous
    {0, 0, 1, 1, 2, 2},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 8},  // many hosts
    {0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
    {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10},
};
constexpr std::size_t kChunk = 256;  // bytes

std::string text_of(const Hosts& hosts) {
  std::string text;
  for (const auto host : hosts) text += (text.empty() ? "" : ",") + std::to_string(host);
  return text;
}

// Calls check(layout, ranks, numbers, seed) for all layouts and sizes around chunks and slices.
template <class Check>
void for_all(const Check& check) {
  for (const Hosts& hosts : kLayouts) {
    const Layout layout(hosts);
    for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 63u, 64u, 65u, 160u, 641u, 2048u}) {
      const bool many = hosts.size() > 8;  // whose plans are long
      if (many && count > 700) continue;
      const unsigned seeds = many ? 1 : 3;
      for (unsigned seed = 0; seed < seeds; ++seed) {
        SCOPED_TRACE("hosts " + text_of(hosts) + ", " + std::to_string(count) + " numbers, seed " +
                     std::to_string(seed));
        check(layout, static_cast<int>(hosts.size()), count, seed);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Layout, CountsHostsFromTheLowestRank) {
  const Layout layout(Hosts{7, 3, 7, 7, 3});
  EXPECT_EQ(layout.hosts(), 2);
  EXPECT_THAT(layout.ranks_on(0), testing::ElementsAre(0, 2, 3));
  EXPECT_THAT(layout.ranks_on(1), testing::ElementsAre(1, 4));
  EXPECT_EQ(layout.host_of(4), 1);
  EXPECT_EQ(layout.place_of(3), 2);
  EXPECT_TRUE(layout.has_levels());
  EXPECT_FALSE(Layout(Hosts{0, 1, 2}).has_levels());
  EXPECT_FALSE(Layout(Hosts{0, 0, 0}).has_levels());
  EXPECT_FALSE(Layout().has_levels());
}

TEST(Layout, GivesEverySliceOneOwnerOnEachHost) {
  for (const Hosts& hosts : kLayouts) {
    const Layout layout(hosts);
    for (int host = 0; host < layout.hosts(); ++host) {
      const auto& ranks = layout.ranks_on(host);
      int slice = 0;
      for (int place = 0; place < static_cast<int>(ranks.size()); ++place) {
        EXPECT_EQ(layout.first_slice(host, place), slice);
        for (; slice < layout.first_slice(host, place + 1); ++slice)
          EXPECT_EQ(layout.owners(slice)[static_cast<std::size_t>(host)],
                    ranks[static_cast<std::size_t>(place)]);
      }
      EXPECT_EQ(slice, layout.slices()) << text_of(hosts);
    }
  }
}

class InLevels : public testing::TestWithParam<Algorithm> {};
INSTANTIATE_TEST_SUITE_P(Hierarchy, InLevels,
                         testing::Values(Algorithm::Leaders, Algorithm::Slices));

TEST_P(InLevels, AllReduceSumsOnEveryRank) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::AllReduce, count), {GetParam(), kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank)
      ASSERT_EQ(world.of(rank).data, sum_of(ranks, count)) << "rank " << rank;
  });
}

// If ranks rounded differently, they would drift apart. The order of messages makes no difference.
TEST_P(InLevels, FloatsHaveTheSameBitsOnEveryRankAndInEveryRun) {
  for (const Hosts& hosts : kLayouts) {
    SCOPED_TRACE(text_of(hosts));
    const Layout layout(hosts);
    const int ranks = static_cast<int>(hosts.size());
    constexpr std::size_t kCount = 777;
    std::vector<std::int32_t> before;
    for (unsigned seed = 0; seed < 3; ++seed) {
      World world(layout, ranks, seed);
      std::mt19937 random(7);
      std::normal_distribution<float> normal;
      std::vector<double> mean(kCount, 0);
      for (int rank = 0; rank < ranks; ++rank) {
        for (std::size_t i = 0; i < kCount; ++i) {
          const float value = normal(random);
          mean[i] += static_cast<double>(value) / ranks;
          world.of(rank).data.push_back(std::bit_cast<std::int32_t>(value));
        }
      }
      Call call = call_of(Kind::AllReduce, kCount);
      call.dtype = Dtype::Float32;
      call.op = ReduceOp::Avg;
      world.plan(call, {GetParam(), kChunk});
      world.run();
      world.expect_all_done();
      for (std::size_t i = 0; i < kCount; ++i)
        ASSERT_NEAR(std::bit_cast<float>(world.of(0).data[i]), mean[i], 1e-6) << "number " << i;
      for (int rank = 1; rank < ranks; ++rank)
        ASSERT_EQ(world.of(rank).data, world.of(0).data) << "rank " << rank;
      if (seed > 0) ASSERT_EQ(world.of(0).data, before);
      before = world.of(0).data;
    }
  }
}

// Odd numbers of eight bits: bfloat16 has all of them, and must round most of their sums.
double short_number(int rank, std::size_t index) {
  return static_cast<double>(1 + (static_cast<std::size_t>(rank) * 50 + index * 14) % 254 / 2 * 2);
}

// Twice as many bfloat16 as 32-bit numbers.
std::vector<std::int32_t> short_numbers_of(int rank, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> memory(count);
  for (std::size_t i = 0; i < 2 * count; ++i) {
    harness::store(Dtype::BFloat16, reinterpret_cast<std::byte*>(memory.data()), i,
                   short_number(rank, 2 * first + i));
  }
  return memory;
}

// Sums rounded once.
std::vector<std::int32_t> short_sums_of(int ranks, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> memory(count);
  for (std::size_t i = 0; i < 2 * count; ++i) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += short_number(rank, 2 * first + i);
    harness::store(Dtype::BFloat16, reinterpret_cast<std::byte*>(memory.data()), i, sum);
  }
  return memory;
}

TEST_P(InLevels, ShortFloatsAreRoundedOnce) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    const int root = (static_cast<int>(seed) * ranks / 2 + ranks / 3) % ranks;
    for (const Kind kind : {Kind::AllReduce, Kind::Reduce}) {
      World world(layout, ranks, seed);
      for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = short_numbers_of(rank, count);
      Call call = call_of(kind, count, kind == Kind::Reduce ? root : 0);
      call.dtype = Dtype::BFloat16;
      world.plan(call, {GetParam(), kChunk});
      world.run();
      world.expect_all_done();
      for (int rank = 0; rank < ranks; ++rank) {
        const bool has_sum = kind == Kind::AllReduce || rank == root;
        ASSERT_EQ(world.of(rank).data,
                  has_sum ? short_sums_of(ranks, count) : short_numbers_of(rank, count))
            << "rank " << rank;
      }
    }
    if (GetParam() == Algorithm::Leaders) return;
    const auto size_of_part = [&](int part) { return count / static_cast<std::size_t>(part + 1); };
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int part = 0; part < ranks; ++part) {
        world.of(rank).inputs.push_back(
            short_numbers_of(rank, size_of_part(part), static_cast<std::size_t>(part)));
      }
      world.of(rank).data.resize(size_of_part(rank));
    }
    Call call = call_of(Kind::ReduceScatter, count);
    call.dtype = Dtype::BFloat16;
    world.plan(call, {Algorithm::Slices, kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(world.of(rank).data,
                short_sums_of(ranks, size_of_part(rank), static_cast<std::size_t>(rank)))
          << "rank " << rank;
    }
  });
}

TEST_P(InLevels, BroadcastCopiesTheRootsNumbersToAll) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    const int root = (static_cast<int>(seed) * ranks / 2 + ranks / 3) % ranks;
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::Broadcast, count, root), {GetParam(), kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank)
      ASSERT_EQ(world.of(rank).data, numbers_of(root, count)) << "rank " << rank;
  });
}

TEST_P(InLevels, ReduceChangesOnlyTheRootsNumbers) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    const int root = (static_cast<int>(seed) * ranks / 2 + ranks / 3) % ranks;
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::Reduce, count, root), {GetParam(), kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(world.of(rank).data, rank == root ? sum_of(ranks, count) : numbers_of(rank, count))
          << "rank " << rank;
    }
  });
}

TEST(Hierarchy, AllGatherGivesEveryRankAllParts) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      world.of(rank).data = numbers_of(rank, count);
      world.of(rank).outputs.assign(static_cast<std::size_t>(ranks),
                                    std::vector<std::int32_t>(count));
    }
    world.plan(call_of(Kind::AllGather, count), {Algorithm::Slices, kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      for (int other = 0; other < ranks; ++other) {
        ASSERT_EQ(world.of(rank).outputs[static_cast<std::size_t>(other)], numbers_of(other, count))
            << "rank " << rank;
      }
    }
  });
}

TEST(Hierarchy, ReduceScatterTakesUnequalPartsAndOnlyReadsThem) {
  for_all([](const Layout& layout, int ranks, std::size_t count, unsigned seed) {
    const auto size_of_part = [&](int part) {
      return part % 3 == 1 ? 0 : count / static_cast<std::size_t>(part + 1);
    };
    const auto part_of = [&](int rank, int part) {
      return numbers_of(rank, size_of_part(part), static_cast<std::size_t>(part));
    };
    World world(layout, ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int part = 0; part < ranks; ++part) world.of(rank).inputs.push_back(part_of(rank, part));
      world.of(rank).data.resize(size_of_part(rank));
    }
    world.plan(call_of(Kind::ReduceScatter, count), {Algorithm::Slices, kChunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(world.of(rank).data,
                sum_of(ranks, size_of_part(rank), static_cast<std::size_t>(rank)))
          << "rank " << rank;
      for (int part = 0; part < ranks; ++part)
        ASSERT_EQ(world.of(rank).inputs[static_cast<std::size_t>(part)], part_of(rank, part));
    }
  });
}

TEST(Hierarchy, BarrierWaitsForEveryRank) {
  for (const Hosts& hosts : kLayouts) {
    SCOPED_TRACE(text_of(hosts));
    const Layout layout(hosts);
    const int ranks = static_cast<int>(hosts.size());
    World all(layout, ranks, 0);
    all.plan({.kind = Kind::Barrier}, {Algorithm::Leaders});
    all.run();
    all.expect_all_done();
    for (int late = 0; late < ranks; ++late) {
      World world(layout, ranks, 0);
      world.plan({.kind = Kind::Barrier}, {Algorithm::Leaders});
      // One rank never enters: no rank may pass.
      for (Plan::Step& step : world.of(late).plan.steps()) ++step.waits_for;
      world.run();
      for (int rank = 0; rank < ranks; ++rank) {
        const auto& steps = world.of(rank).plan.steps();
        const bool passed = std::all_of(steps.begin(), steps.end(), [](const Plan::Step& step) {
          return step.state == Plan::State::Done;
        });
        EXPECT_FALSE(passed) << "rank " << rank << " passed without rank " << late;
      }
    }
  }
}

// Each host's bytes cross the network once each way: 2 (h - 1) / h of an all_reduce's bytes, and
// what the other hosts do not have of the others.
TEST(Hierarchy, SendsEachHostsBytesOverTheNetworkOnce) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1, 0, 1}, Hosts{0, 0, 0, 1},
                             Hosts{0, 0, 1, 1, 2, 2, 3, 3}, Hosts{0, 1, 2, 3, 3, 3}}) {
    SCOPED_TRACE(text_of(hosts));
    const Layout layout(hosts);
    const int ranks = static_cast<int>(hosts.size());
    const auto h = static_cast<std::size_t>(layout.hosts());
    constexpr std::size_t kCount = 3 * 4 * 16 * 40;
    constexpr std::size_t kBytes = kCount * 4;
    constexpr std::size_t kChunkOf = 3 * 4 * 64 * 4;  // whole slices for each host
    const auto sent = [&](Kind kind) {
      World world(layout, ranks, 1);
      for (int rank = 0; rank < ranks; ++rank) {
        Member& member = world.of(rank);
        member.data = numbers_of(rank, kCount);
        member.outputs.assign(static_cast<std::size_t>(ranks), member.data);
        member.inputs = member.outputs;
      }
      world.plan(call_of(kind, kCount), {Algorithm::Slices, kChunkOf});
      world.run();
      world.expect_all_done();
      return world.crossed;
    };
    EXPECT_THAT(sent(Kind::AllReduce), testing::Each(2 * (h - 1) * kBytes / h));
    for (std::size_t host = 0; host < h; ++host) {
      const std::size_t here = layout.ranks_on(static_cast<int>(host)).size();
      EXPECT_EQ(sent(Kind::AllGather)[host], here * (h - 1) * kBytes);
      EXPECT_EQ(sent(Kind::ReduceScatter)[host], (static_cast<std::size_t>(ranks) - here) * kBytes);
    }
    const auto reduced = sent(Kind::Reduce), copied = sent(Kind::Broadcast);
    std::size_t all = 0;
    for (const std::size_t bytes : copied) all += bytes;
    EXPECT_EQ(all, (h - 1) * kBytes);  // each host receives the bytes once
    EXPECT_EQ(copied[0], kBytes);      // and root's host sends them once
    for (std::size_t host = 1; host < h; ++host) EXPECT_EQ(reduced[host], kBytes);
  }
}

// Small collectives wait for the network as often as a tree of hosts is deep, however many ranks a
// host has.
TEST(Hierarchy, SmallCollectivesTakeFewTripsOverTheNetwork) {
  struct Case {
    Kind kind;
    std::size_t hosts;
    int trips;
  };
  for (const Case& one :
       {Case{Kind::AllReduce, 2, 1}, Case{Kind::AllReduce, 8, 1}, Case{Kind::AllReduce, 16, 4},
        Case{Kind::Broadcast, 2, 1}, Case{Kind::Broadcast, 16, 4}, Case{Kind::Reduce, 16, 1},
        Case{Kind::Barrier, 2, 1}, Case{Kind::Barrier, 16, 4}, Case{Kind::AllGather, 16, 1},
        Case{Kind::ReduceScatter, 16, 1}, Case{Kind::AllToAll, 16, 1}}) {
    Hosts hosts;
    for (std::uint32_t rank = 0; rank < one.hosts * 3; ++rank) hosts.push_back(rank / 3);
    const Layout layout(hosts);
    const int ranks = static_cast<int>(hosts.size());
    World world(layout, ranks, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      Member& member = world.of(rank);
      member.data = numbers_of(rank, 4);
      member.outputs.assign(hosts.size(), member.data);
      member.inputs = member.outputs;
    }
    const Call call = call_of(one.kind, one.kind == Kind::ReduceScatter ? 4 * hosts.size() : 4);
    world.plan(call, choose_in_levels(call, arithmetic_of(call.dtype, call.op, ranks), layout,
                                      ranks, choose));
    world.run();
    world.expect_all_done();
    EXPECT_EQ(world.trips, one.trips) << describe(call) << " over " << one.hosts << " hosts";
  }
}

// The network is not idle while the first chunks are on their way.
TEST(Hierarchy, EightChunksAreUnderWayAtOnce) {
  const Layout layout(Hosts{0, 0, 1, 1});
  constexpr std::size_t kCount = 512;
  for (const std::size_t chunks : {8u, 9u}) {
    World world(layout, 4, 0);
    for (int rank = 0; rank < 4; ++rank) {
      world.of(rank).data = numbers_of(rank, kCount * chunks);
      world.of(rank).outputs.assign(4, world.of(rank).data);
    }
    world.plan(call_of(Kind::AllGather, kCount * chunks), {Algorithm::Slices, kCount * 4});
    world.run();
    world.expect_all_done();
    EXPECT_EQ(world.trips, chunks == 8 ? 1 : 2) << chunks;
  }
}

// Two hosts swap their sums: there is no second trip that brings results back.
TEST(Hierarchy, LargeAllReduceOfTwoHostsTakesOneTripAChunk) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 0, 0, 1}}) {
    SCOPED_TRACE(text_of(hosts));
    const Layout layout(hosts);
    const int ranks = static_cast<int>(hosts.size());
    constexpr std::size_t kCount = 512;
    World world(layout, ranks, 0);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, kCount);
    world.plan(call_of(Kind::AllReduce, kCount), {Algorithm::Slices, kCount * 4});
    world.run();
    world.expect_all_done();
    EXPECT_EQ(world.trips, 1);
  }
}

}  // namespace
}  // namespace weft::transport::mesh
