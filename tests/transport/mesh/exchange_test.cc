// SPDX-License-Identifier: Apache-2.0
// Tests an all_to_all of equal parts over hosts: its messages between hosts are gathered, and ranks
// that call it in the form for parts of any size still meet it.
#include <barrier>

#include <weft/tests/transport/mesh/mesh_group.h>
#include <weft/tests/transport/mesh/plan_world.h>

namespace weft::transport::mesh {
namespace {

using testing::HasSubstr;

using Hosts = std::vector<int>;  // by rank

const Hosts kLayouts[] = {
    {0, 0, 1, 1},       {0, 0, 0, 1}, {1, 0, 0, 0},       {0, 0, 1, 1, 1},  // unequal
    {0, 1, 0},          {0, 1, 0, 1}, {0, 1, 1, 0, 2, 0}, {5, 5, 2, 2, 9},  // not contiguous
    {0, 0, 1, 1, 2, 2}, {0, 1, 2, 1},
};

std::string text_of(const Hosts& hosts) {
  std::string text;
  for (const int host : hosts) text += (text.empty() ? "" : ",") + std::to_string(host);
  return text;
}

Layout layout_of(const Hosts& hosts) {
  return Layout(std::vector<std::uint32_t>(hosts.begin(), hosts.end()));
}

// Rank `from` sends `to` the numbers from to * count on.
void give_parts(World& world, std::size_t count) {
  for (int rank = 0; rank < world.ranks(); ++rank) {
    Member& member = world.of(rank);
    for (int to = 0; to < world.ranks(); ++to)
      member.inputs.push_back(numbers_of(rank, count, static_cast<std::size_t>(to) * count));
    member.outputs.assign(world.members.size(), std::vector<std::int32_t>(count));
  }
}

// Runs the plans of all ranks.
void exchange(World& world, std::size_t count, Algorithm algorithm) {
  give_parts(world, count);
  world.plan(call_of(Kind::AllToAll, count), {algorithm});
  world.run();
  world.expect_all_done();
}

TEST(Exchange, GivesEveryRankThePartsForIt) {
  for (const Hosts& hosts : kLayouts) {
    const Layout layout = layout_of(hosts);
    for (const std::size_t count : {0u, 1u, 16u, 641u}) {
      for (unsigned seed = 0; seed < 5; ++seed) {
        SCOPED_TRACE("hosts " + text_of(hosts) + ", " + std::to_string(count) + " numbers, seed " +
                     std::to_string(seed));
        World world(layout, static_cast<int>(hosts.size()), seed);
        exchange(world, count, Algorithm::Leaders);
        for (int rank = 0; rank < world.ranks(); ++rank) {
          for (int from = 0; from < world.ranks(); ++from) {
            ASSERT_EQ(world.of(rank).outputs[static_cast<std::size_t>(from)],
                      numbers_of(from, count, static_cast<std::size_t>(rank) * count))
                << "rank " << rank << " from rank " << from;
          }
        }
      }
    }
  }
}

TEST(Exchange, SendsOneMessageFromHostToHost) {
  constexpr std::size_t kCount = 8;
  for (const Hosts& hosts : kLayouts) {
    SCOPED_TRACE(text_of(hosts));
    const Layout layout = layout_of(hosts);
    const int ranks = static_cast<int>(hosts.size());
    World gathered(layout, ranks, 0), direct(layout, ranks, 0);
    exchange(gathered, kCount, Algorithm::Leaders);
    exchange(direct, kCount, Algorithm::Direct);
    for (int host = 0; host < layout.hosts(); ++host) {
      const auto index = static_cast<std::size_t>(host);
      const std::size_t here = layout.ranks_on(host).size();
      EXPECT_EQ(gathered.messages[index], layout.hosts() - 1);
      EXPECT_EQ(direct.messages[index], here * (static_cast<std::size_t>(ranks) - here));
    }
    EXPECT_EQ(gathered.crossed, direct.crossed);  // bytes
    EXPECT_EQ(gathered.trips, 1);
  }
}

// So they share the work, and each has connections to few hosts.
TEST(Exchange, RanksOfAHostLeadForDifferentHosts) {
  const Layout layout = layout_of({0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3});
  World world(layout, 12, 0);
  exchange(world, 4, Algorithm::Leaders);
  for (int rank = 0; rank < 12; ++rank) {
    int far = 0;
    for (const Plan::Step& step : world.of(rank).plan.steps()) {
      if (step.action == Plan::Action::Send && layout.host_of(step.peer) != layout.host_of(rank))
        ++far;
    }
    EXPECT_EQ(far, 1) << "rank " << rank;
  }
}

TEST(Exchange, IsChosenForSmallEqualPartsOverHosts) {
  const Layout two = layout_of({0, 0, 1, 1}), eight = layout_of({0, 1, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_TRUE(gathers_parts(two, 2 << 10));
  EXPECT_FALSE(gathers_parts(two, (2 << 10) + 1));
  EXPECT_TRUE(gathers_parts(eight, 128));
  EXPECT_FALSE(gathers_parts(eight, 129));
  EXPECT_FALSE(gathers_parts(two, 0));
  EXPECT_FALSE(gathers_parts(Layout(), 8));
  EXPECT_FALSE(gathers_parts(layout_of({0, 0, 0}), 8));
  EXPECT_FALSE(gathers_parts(layout_of({0, 1, 2}), 8));
  const auto algorithm = [&](const Layout& layout, std::size_t bytes) {
    const Call call{.kind = Kind::AllToAll, .dtype = Dtype::Int8, .bytes = bytes};
    return choose_in_levels(call, arithmetic_of(call.dtype, call.op, 4), layout, 4, choose)
        .algorithm;
  };
  EXPECT_EQ(algorithm(two, 8), Algorithm::Leaders);
  EXPECT_EQ(algorithm(two, 0), Algorithm::Direct);
}

// --- Communicators

// One rank's part of an all_to_all.
class Parts {
 public:
  // `bytes` of each part; `round` makes the numbers of each call different.
  Parts(const Communicator& ranks, std::size_t bytes, int round)
      : rank_(ranks.rank()), round_(round) {
    for (int peer = 0; peer < ranks.size(); ++peer) {
      in_.push_back(part(rank_, peer, bytes));
      out_.emplace_back(bytes, std::byte{0xee});
    }
    for (auto& one : in_) inputs.push_back({one.data(), one.size(), Device::host()});
    for (auto& one : out_) outputs.push_back({one.data(), one.size(), Device::host()});
  }
  Op exchange(Communicator& ranks, Dtype dtype, bool has_equal_parts) {
    return ranks.run({.kind = Kind::AllToAll,
                      .dtype = dtype,
                      .inputs = inputs,
                      .outputs = outputs,
                      .has_equal_parts = has_equal_parts},
                     Pin(), Fence());
  }
  void expect_exchanged() {
    for (std::size_t from = 0; from < out_.size(); ++from) {
      ASSERT_EQ(out_[from], part(static_cast<int>(from), rank_, out_[from].size()))
          << "from rank " << from << " to rank " << rank_ << " in round " << round_;
      ASSERT_EQ(in_[from], part(rank_, static_cast<int>(from), in_[from].size()));
    }
  }
  std::vector<Slice> inputs, outputs;

 private:
  std::vector<std::byte> part(int from, int to, std::size_t bytes) const {
    std::vector<std::byte> memory(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
      memory[i] = static_cast<std::byte>(from * 61 + to * 17 + round_ * 7 + static_cast<int>(i));
    return memory;
  }
  int rank_, round_;
  std::vector<std::vector<std::byte>> in_, out_;
};

class ExchangeOver : public testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Hosts, ExchangeOver, testing::ValuesIn(kLayouts));

TEST_P(ExchangeOver, MovesEveryDtypeAndSize) {
  run_ranks_on(GetParam(), [](Communicator& ranks) {
    int round = 0;
    for (int number = 0; number <= static_cast<int>(Dtype::UInt64); ++number) {
      const auto dtype = static_cast<Dtype>(number);
      for (const std::size_t count : {0u, 1u, 7u, 300u, 5000u}) {  // the last goes directly
        Parts parts(ranks, count * size_of(dtype), ++round);
        expect_done(parts.exchange(ranks, dtype, true), std::string(name(dtype)));
        parts.expect_exchanged();
      }
    }
  });
}

// Every rank takes its turn in calling it in the other form, alone and with another one.
TEST_P(ExchangeOver, MeetsRanksThatDoNotSayThatPartsAreEqual) {
  run_ranks_on(GetParam(), [](Communicator& ranks) {
    constexpr int kRounds = 60;
    std::vector<Parts> parts;
    std::vector<Op> ops;
    for (int round = 0; round < kRounds; ++round)
      parts.emplace_back(ranks, round % 3 == 0 ? 4 : 1000, round);
    for (int round = 0; round < kRounds; ++round) {
      const int odd = round % ranks.size(), second = (round * 7 + 3) % (3 * ranks.size());
      const bool says_so = ranks.rank() != odd && ranks.rank() != second;
      ops.push_back(parts[static_cast<std::size_t>(round)].exchange(ranks, Dtype::Int16, says_so));
      // Some calls begin when the one before has ended, others while it is under way.
      if (round % 4 == 0) expect_done(ops.back(), "round " + std::to_string(round));
    }
    for (const Op& op : ops) expect_done(op, "all_to_all");
    for (Parts& one : parts) one.expect_exchanged();
    expect_done(ranks.barrier(Fence()), "barrier");
  });
}

// The rank that does not say so calls first, before any other has sent; or last, when the others
// have sent all that they can.
TEST_P(ExchangeOver, MeetsSuchARankBeforeAndAfterOthers) {
  const auto ranks = GetParam().size();
  const Group group(static_cast<int>(ranks), [&](const JoinOptions& options) {
    const int host = GetParam()[static_cast<std::size_t>(options.rank)];
    return mesh::join(std::make_shared<OnHost>(std::to_string(host)), "inproc", options,
                      [](const std::string&) { return Chooser(choose); });
  });
  int round = 0;
  for (std::size_t odd = 0; odd < ranks; ++odd) {
    for (const bool is_first : {true, false}) {
      std::vector<Parts> parts;
      for (const auto& one : group.communicators) parts.emplace_back(*one, 40, round);
      ++round;
      std::vector<Op> ops;
      const auto call = [&](bool is_odd) {
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          if (is_odd == (rank == odd))
            ops.push_back(parts[rank].exchange(*group.communicators[rank], Dtype::Int8, !is_odd));
        }
        group.settle();
      };
      call(is_first);
      for (const Op& op : ops) EXPECT_FALSE(op.done().query());
      call(!is_first);
      for (const Op& op : ops) expect_done(op, "all_to_all");
      for (Parts& one : parts) one.expect_exchanged();
    }
  }
}

// Rank 0 has parts of `bytes` and the others of 16: every rank meets an error that says this.
void expect_refused(std::size_t bytes, bool says_so, const std::string& text) {
  run_ranks_on({0, 0, 1, 1}, [&](Communicator& ranks) {
    // Connections may read it after the operation has failed.
    const auto parts = std::make_shared<Parts>(ranks, ranks.rank() == 0 ? bytes : 16, 0);
    const Op op = ranks.run({.kind = Kind::AllToAll,
                             .dtype = Dtype::Float32,
                             .inputs = parts->inputs,
                             .outputs = parts->outputs,
                             .has_equal_parts = ranks.rank() != 0 || says_so},
                            parts, Fence());
    ASSERT_TRUE(op.done().synchronize(soon()));
    const Error error = expect_failed(ranks.barrier(Fence()), "the operation after it");
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), HasSubstr(text));
  });
}

TEST(Exchange, OfDifferentSizesIsRefusedByName) {
  expect_refused(12, true, "all_to_all of parts of 3 elements of float32");
  expect_refused(12, true, "all_to_all of parts of 4 elements of float32");
  expect_refused(12, false, "elements of float32 to rank ");
  expect_refused(0, true, "elements of float32 to rank ");
  expect_refused(1 << 20, true, "elements of float32 to rank ");
}

// Rank 0 exchanges nothing with rank 3, which is on the other host and leads for none.
TEST(Exchange, LossOfARankEndsItOnAllRanks) {
  for (const int lost : {2, 3}) {
    std::barrier under_way(4);
    run_ranks_on({0, 0, 1, 1}, [&](Communicator& ranks) {
      if (ranks.rank() == lost) {
        under_way.arrive_and_wait();
        return ranks.abort(Error(Blame::Cancelled, "the test aborts it"));
      }
      const auto parts = std::make_shared<Parts>(ranks, 64, 0);
      const Op op = ranks.run({.kind = Kind::AllToAll,
                               .inputs = parts->inputs,
                               .outputs = parts->outputs,
                               .has_equal_parts = true},
                              parts, Fence());
      EXPECT_FALSE(op.done().query());
      under_way.arrive_and_wait();
      EXPECT_EQ(expect_failed(op, "all_to_all without a rank").blame(), Blame::PeerLost);
    });
  }
}

}  // namespace
}  // namespace weft::transport::mesh
