// SPDX-License-Identifier: Apache-2.0
// Collectives of realistic sizes over real connections, compared with a plain reference; and calls
// that do not match.
#include <atomic>
#include <map>

#include <weft/tests/harness/elements.h>
#include <weft/tests/transport/mesh/mesh_ranks.h>

namespace weft::transport::mesh {
namespace {

using testing::HasSubstr;

constexpr Dtype kDtypes[] = {
    Dtype::UInt8,   Dtype::Int8,           Dtype::Int16,          Dtype::Int32,  Dtype::Int64,
    Dtype::Float16, Dtype::Float32,        Dtype::Float64,        Dtype::Bool,   Dtype::BFloat16,
    Dtype::UInt16,  Dtype::ComplexFloat32, Dtype::ComplexFloat64, Dtype::UInt32, Dtype::UInt64};
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg,    ReduceOp::Product, ReduceOp::Min,
                             ReduceOp::Max, ReduceOp::BitAnd, ReduceOp::BitOr,   ReduceOp::BitXor};

// Small numbers, so that the results of a few ranks are exact in every dtype, and averages nearly
// exact.
double number(Dtype dtype, int rank, std::size_t index) {
  const auto mixed = static_cast<std::size_t>(rank) * 3 + index * 7 % 11;
  return dtype == Dtype::Bool ? static_cast<double>(mixed % 2) : static_cast<double>(1 + mixed % 3);
}

std::vector<std::byte> memory_of(Dtype dtype, int rank, std::size_t elements) {
  std::vector<std::byte> memory(elements * size_of(dtype));
  for (std::size_t i = 0; i < harness::numbers_in(dtype, memory.size()); ++i) {
    harness::store(dtype, memory.data(), i, number(dtype, rank, i));
  }
  return memory;
}

double reduce(Dtype dtype, ReduceOp op, double a, double b) {
  const auto x = static_cast<std::int64_t>(a), y = static_cast<std::int64_t>(b);
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg: return dtype == Dtype::Bool ? std::max(a, b) : a + b;
    case ReduceOp::Product: return a * b;
    case ReduceOp::Min: return std::min(a, b);
    case ReduceOp::Max: return std::max(a, b);
    case ReduceOp::BitAnd: return static_cast<double>(x & y);
    case ReduceOp::BitOr: return static_cast<double>(x | y);
    case ReduceOp::BitXor: return static_cast<double>(x ^ y);
  }
  return 0;
}

// The index-th number of the result.
double expected(Dtype dtype, ReduceOp op, int ranks, std::size_t index) {
  double result = number(dtype, 0, index);
  for (int rank = 1; rank < ranks; ++rank)
    result = reduce(dtype, op, result, number(dtype, rank, index));
  return op == ReduceOp::Avg ? result / ranks : result;
}

// False for products of complex numbers: reduce() computes them part by part.
bool has_plain_reference(Dtype dtype, ReduceOp op) {
  return op != ReduceOp::Product ||
         (dtype != Dtype::ComplexFloat32 && dtype != Dtype::ComplexFloat64);
}

double tolerance_of(Dtype dtype) {
  if (dtype == Dtype::BFloat16) return 4e-3;
  if (dtype == Dtype::Float16) return 5e-4;
  return 1e-6;
}

void expect_reduced(const std::vector<std::byte>& memory, Dtype dtype, ReduceOp op, int ranks,
                    const std::string& what) {
  for (std::size_t i = 0; i < harness::numbers_in(dtype, memory.size()); ++i) {
    const double wanted = expected(dtype, op, ranks, i);
    ASSERT_NEAR(harness::load(dtype, memory.data(), i), wanted, tolerance_of(dtype) * wanted)
        << what << ", number " << i;
  }
}

// The host of each rank.
using Hosts = std::vector<int>;
class MeshCollectives : public testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Mesh, MeshCollectives,
                         testing::Values(Hosts{0}, Hosts{0, 0}, Hosts{0, 0, 0}, Hosts{0, 0, 0, 0},
                                         Hosts{0, 0, 1, 1}, Hosts{0, 0, 0, 1}, Hosts{0, 1, 0},
                                         Hosts{0, 1, 1, 0}, Hosts{0, 1, 2, 1}));

TEST_P(MeshCollectives, AllReduceIsRightForAllDtypesAndOps) {
  run_ranks_on(GetParam(), [](Communicator& communicator) {
    for (const Dtype dtype : kDtypes) {
      for (const ReduceOp op : kOps) {
        if (!communicator.can_reduce(dtype, op)) continue;
        for (const std::size_t bytes : {48u, 200'016u}) {
          const std::size_t elements = bytes / size_of(dtype) + (bytes > 100 ? 1 : 0);
          auto data = memory_of(dtype, communicator.rank(), elements);
          const std::string what = std::string(name(dtype)) + " " + std::string(name(op)) + " x " +
                                   std::to_string(elements);
          expect_done(communicator.all_reduce(elements_of(data, dtype), op, Pin(), Fence()), what);
          if (has_plain_reference(dtype, op))
            expect_reduced(data, dtype, op, communicator.size(), what);
        }
      }
    }
  });
}

TEST_P(MeshCollectives, ResultsAreRightAroundSizeBoundaries) {
  // Boundaries: zero elements, fewer elements than ranks, one message, a block's rounding, one
  // chunk, many chunks; for each algorithm that is chosen.
  const std::vector<std::size_t> counts{0,    1,    2,    3,    5,    15,     16,      17,
                                        4095, 4096, 4097, 8192, 8193, 40'001, 150'001, 700'001};
  run_ranks_on(GetParam(), [&](Communicator& communicator) {
    for (const std::size_t count : counts) {
      const std::string what = std::to_string(count) + " numbers";
      auto data = memory_of(Dtype::Float32, communicator.rank(), count);
      expect_done(
          communicator.all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Sum, Pin(), Fence()),
          what);
      expect_reduced(data, Dtype::Float32, ReduceOp::Sum, communicator.size(),
                     "all_reduce of " + what);

      const int root = static_cast<int>(count) % communicator.size();
      const auto start = memory_of(Dtype::BFloat16, communicator.rank(), count);
      auto own = start;
      expect_done(communicator.reduce(elements_of(own, Dtype::BFloat16), root, ReduceOp::Avg, Pin(),
                                      Fence()),
                  what);
      if (communicator.rank() == root) {
        expect_reduced(own, Dtype::BFloat16, ReduceOp::Avg, communicator.size(),
                       "reduce of " + what);
      } else {
        ASSERT_EQ(own, start) << "reduce of " << what;
      }

      auto sent = memory_of(Dtype::Int8, communicator.rank(), count);
      expect_done(communicator.broadcast(elements_of(sent, Dtype::Int8), root, Pin(), Fence()),
                  what);
      ASSERT_EQ(sent, memory_of(Dtype::Int8, root, count)) << "broadcast of " << what;
    }
  });
}

TEST_P(MeshCollectives, ReduceScatterOnlyReadsItsInputs) {
  run_ranks_on(GetParam(), [](Communicator& communicator) {
    constexpr std::size_t kCount = 100'003;
    const auto ranks = static_cast<std::size_t>(communicator.size());
    const auto start = memory_of(Dtype::Float64, communicator.rank(), kCount);
    std::vector<std::vector<std::byte>> inputs(ranks, start);
    std::vector<Slice> slices;
    for (auto& input : inputs) slices.push_back({input.data(), input.size(), Device::host()});
    std::vector<std::byte> output(start.size());
    expect_done(communicator.reduce_scatter(elements_of(output, Dtype::Float64), slices,
                                            ReduceOp::Max, Pin(), Fence()),
                "reduce_scatter");
    expect_reduced(output, Dtype::Float64, ReduceOp::Max, communicator.size(), "reduce_scatter");
    for (const auto& input : inputs) ASSERT_EQ(input, start);
  });
}

TEST_P(MeshCollectives, AllGatherGivesEveryRankAllParts) {
  run_ranks_on(GetParam(), [](Communicator& communicator) {
    const auto ranks = static_cast<std::size_t>(communicator.size());
    for (const std::size_t count : {0u, 1u, 4097u, 300'001u}) {
      std::vector<std::vector<std::byte>> gathered(ranks, std::vector<std::byte>(count * 2));
      std::vector<Slice> outputs;
      for (auto& one : gathered) outputs.push_back({one.data(), one.size(), Device::host()});
      auto input = memory_of(Dtype::Int16, communicator.rank(), count);
      expect_done(
          communicator.all_gather(outputs, elements_of(input, Dtype::Int16), Pin(), Fence()),
          "all_gather");
      for (int rank = 0; rank < communicator.size(); ++rank) {
        ASSERT_EQ(gathered[static_cast<std::size_t>(rank)], memory_of(Dtype::Int16, rank, count))
            << "rank " << rank;
      }
    }
  });
}

TEST_P(MeshCollectives, BarrierEndsAfterAllRanksCameToIt) {
  std::atomic<int> came{0};
  run_ranks_on(GetParam(), [&](Communicator& communicator) {
    for (int round = 1; round <= 20; ++round) {
      ++came;
      expect_done(communicator.barrier(Fence()), "barrier");
      ASSERT_GE(came, round * communicator.size());
    }
  });
}

// Rank 0 exchanges nothing with rank 3, which is on the other host in another place.
TEST(Mesh, LossOfARankEndsCollectivesInTwoLevelsOnAllRanks) {
  run_ranks_on({0, 0, 1, 1}, [](Communicator& communicator) {
    if (communicator.rank() == 3)
      return communicator.abort(Error(Blame::Cancelled, "the test aborts it"));
    // Connections may read it after the operation has failed.
    const auto data = std::make_shared<std::vector<float>>(1 << 20, 1.f);
    const Op op =
        communicator.all_reduce(elements_of(*data, Dtype::Float32), ReduceOp::Sum, data, Fence());
    EXPECT_EQ(expect_failed(op, "all_reduce without rank 3").blame(), Blame::PeerLost);
  });
}

TEST(Mesh, ManyRanksUseARing) {
  run_ranks(10, [](Communicator& communicator) {
    for (const std::size_t count : {1u, 3u, 20'001u}) {
      auto data = memory_of(Dtype::Float32, communicator.rank(), count);
      expect_done(
          communicator.all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Avg, Pin(), Fence()),
          "all_reduce");
      expect_reduced(data, Dtype::Float32, ReduceOp::Avg, 10, std::to_string(count) + " numbers");
      auto sent = memory_of(Dtype::Int16, communicator.rank(), count);
      expect_done(communicator.broadcast(elements_of(sent, Dtype::Int16), 7, Pin(), Fence()),
                  "broadcast");
      ASSERT_EQ(sent, memory_of(Dtype::Int16, 7, count));
      std::vector<std::vector<std::byte>> gathered(10, std::vector<std::byte>(count * 2));
      std::vector<Slice> outputs;
      for (auto& one : gathered) outputs.push_back({one.data(), one.size(), Device::host()});
      auto input = memory_of(Dtype::Int16, communicator.rank(), count);
      expect_done(
          communicator.all_gather(outputs, elements_of(input, Dtype::Int16), Pin(), Fence()),
          "all_gather");
      for (int rank = 0; rank < 10; ++rank) {
        ASSERT_EQ(gathered[static_cast<std::size_t>(rank)], memory_of(Dtype::Int16, rank, count))
            << "rank " << rank;
      }
    }
  });
}

TEST_P(MeshCollectives, SumsHaveTheSameBitsOnAllRanks) {
  std::mutex mutex;
  std::map<std::string, std::vector<std::vector<std::byte>>> results;
  run_ranks_on(GetParam(), [&](Communicator& communicator) {
    for (const Dtype dtype : {Dtype::Float16, Dtype::BFloat16, Dtype::Float32, Dtype::Float64}) {
      for (const std::size_t count : {7u, 1003u, 100'003u}) {
        std::vector<std::byte> data(count * size_of(dtype));
        for (std::size_t i = 0; i < count; ++i) {
          harness::store(dtype, data.data(), i,
                         1.0 / (1.0 + static_cast<double>(i % 977) + 7.7 * communicator.rank()));
        }
        expect_done(
            communicator.all_reduce(elements_of(data, dtype), ReduceOp::Sum, Pin(), Fence()),
            "all_reduce");
        std::lock_guard lock(mutex);
        results[std::string(name(dtype)) + std::to_string(count)].push_back(data);
      }
    }
  });
  for (const auto& [what, of_ranks] : results) {
    ASSERT_EQ(of_ranks.size(), GetParam().size());
    for (const auto& result : of_ranks) EXPECT_EQ(result, of_ranks.front()) << what;
  }
}

// --- Calls that do not match

using CallOf = std::function<Op(Communicator&, std::vector<float>&)>;

// Rank 0 makes the first call, rank 1 the second: both must fail, and both errors must contain the
// words.
void expect_mismatch(const CallOf& first, const CallOf& second,
                     const std::vector<std::string>& words) {
  run_ranks(2, [&](Communicator& communicator) {
    std::vector<float> data(64, 1);
    const Op op = (communicator.rank() == 0 ? first : second)(communicator, data);
    std::vector<Error> errors;
    // A rank that only sends may have finished; its next operation reveals the mismatch.
    if (op.done().synchronize(soon()) && op.error()) errors.push_back(*op.error());
    const Op next = communicator.barrier(Fence());
    errors.push_back(expect_failed(next, "the operation after a mismatch"));
    for (const Error& error : errors) {
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      for (const std::string& word : words) EXPECT_THAT(error.text(), HasSubstr(word));
    }
    EXPECT_EQ(expect_failed(communicator.barrier(Fence()), "a later operation").blame(),
              Blame::Caller);
  });
}

Op sum(Communicator& communicator, std::vector<float>& data, std::size_t count = 64,
       Dtype dtype = Dtype::Float32, ReduceOp op = ReduceOp::Sum) {
  return communicator.all_reduce({{data.data(), count * 4, Device::host()}, dtype}, op, Pin(),
                                 Fence());
}

TEST(Mismatch, DifferentCollectivesAreNamed) {
  expect_mismatch([](auto& c, auto& data) { return sum(c, data); },
                  [](auto& c, auto& data) {
                    return c.broadcast(elements_of(data, Dtype::Float32), 1, Pin(), Fence());
                  },
                  {"all_reduce of 64 elements", "broadcast of 64 elements", "same order"});
}

TEST(Mismatch, DifferentSizesAreNamed) {
  expect_mismatch([](auto& c, auto& data) { return sum(c, data, 64); },
                  [](auto& c, auto& data) { return sum(c, data, 63); },
                  {"64 elements", "63 elements"});
}

TEST(Mismatch, DifferentlyCutSizesAreNamed) {
  const auto many = [](auto& c, auto&) {
    static std::vector<float> large(1 << 20);  // outlives the failed operations of both ranks
    return sum(c, large, large.size());
  };
  expect_mismatch([](auto& c, auto& data) { return sum(c, data, 1); }, many,
                  {"of 1 element of", "of 1048576 elements of"});
}

TEST(Mismatch, DifferentDtypesAreNamed) {
  expect_mismatch([](auto& c, auto& data) { return sum(c, data, 64, Dtype::Float32); },
                  [](auto& c, auto& data) { return sum(c, data, 64, Dtype::Int32); },
                  {"float32", "int32"});
}

TEST(Mismatch, DifferentOperatorsAreNamed) {
  expect_mismatch(
      [](auto& c, auto& data) { return sum(c, data, 64, Dtype::Float32, ReduceOp::Min); },
      [](auto& c, auto& data) { return sum(c, data, 64, Dtype::Float32, ReduceOp::Max); },
      {"Min", "Max"});
}

TEST(Mismatch, TwoSendingRootsBothFail) {
  expect_mismatch(
      [](auto& c, auto& data) {
        return c.broadcast(elements_of(data, Dtype::Float32), 0, Pin(), Fence());
      },
      [](auto& c, auto& data) {
        return c.broadcast(elements_of(data, Dtype::Float32), 1, Pin(), Fence());
      },
      {"broadcast"});
}

TEST(Mismatch, DifferentPartsOfAllToAllAreNamed) {
  run_ranks(2, [](Communicator& communicator) {
    std::vector<float> sent(8, 1), received(8);
    // Rank 1 expects fewer bytes than rank 0 sends it.
    const std::size_t expected = communicator.rank() == 0 ? 16 : 12;
    const std::vector<Slice> inputs{{sent.data(), 16, Device::host()},
                                    {sent.data(), 16, Device::host()}};
    const std::vector<Slice> outputs{{received.data(), expected, Device::host()},
                                     {received.data() + 4, expected, Device::host()}};
    const Op op = communicator.all_to_all(outputs, inputs, Dtype::Float32, Pin(), Fence());
    const bool ended = op.done().synchronize(soon());
    ASSERT_TRUE(ended);
    const Error error = expect_failed(communicator.barrier(Fence()), "the operation after it");
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(
        error.text(),
        HasSubstr(
            "rank 0 sends 4 elements of float32 to rank 1, which expects 3 elements of float32"));
  });
}

TEST(Mesh, UnsupportedOperatorIsRefused) {
  run_ranks(2, [](Communicator& communicator) {
    std::vector<float> data(4, 1);
    const Op op = communicator.all_reduce(elements_of(data, Dtype::Float32), ReduceOp::BitXor,
                                          Pin(), Fence());
    EXPECT_EQ(expect_failed(op, "BitXor of floats").blame(), Blame::Unsupported);
    expect_done(
        communicator.all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Sum, Pin(), Fence()),
        "Sum");
    EXPECT_EQ(data[0], 2);
  });
}

TEST(Mesh, MayBeDroppedAsItsOperationEnds) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto options = options_of(rank, 2, store);
      auto communicator = join_inproc(options);
      std::vector<float> data(100'000, 1);
      const LoopFlag ended(options.loop);
      const Op op = communicator->all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Sum,
                                             Pin(), Fence());
      std::mutex mutex;
      op.on_ended([&] {
        std::lock_guard lock(mutex);
        communicator.reset();
      });
      ASSERT_TRUE(op.done().synchronize(soon()));
      // The other rank may leave first, but by then all of this rank's data has arrived.
      EXPECT_FALSE(op.error()) << op.error()->what();
      EXPECT_EQ(data[99'999], 2);
      std::lock_guard lock(mutex);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace weft::transport::mesh
