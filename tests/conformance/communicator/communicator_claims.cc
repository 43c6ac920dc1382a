// SPDX-License-Identifier: Apache-2.0
// The claims about every communicator, over any backend. The communicator itself says which dtypes,
// operators, tags and sources it supports.
#include <numeric>
#include <thread>

#include <gmock/gmock.h>

#include <weft/tests/conformance/communicator/numbers.h>

namespace weft::conformance {
namespace {

using testing::HasSubstr;
using transport::PointToPoint;

constexpr std::size_t kCounts[] = {0, 1, 7, 1000};

Deadline soon() { return Deadline::in(std::chrono::seconds(60)); }

// Checks that the operation ends without an error.
void expect_done(const Op& op, const std::string& what) {
  ASSERT_TRUE(op.done().synchronize(soon())) << what << " does not end";
  const auto error = op.error();
  ASSERT_FALSE(error) << what << ": " << error->what();
}

// Returns the error that the operation ends with.
Error expect_failed(const Op& op, const std::string& what) {
  EXPECT_TRUE(op.done().synchronize(soon())) << what << " failed, but its fence does not pass";
  const auto error = op.error();
  EXPECT_TRUE(error) << what << " did not fail";
  return error.value_or(Error(Blame::Caller, "no error"));
}

std::string text_of(Dtype dtype, std::size_t count, const std::string& rest = "") {
  return std::string(name(dtype)) + " x " + std::to_string(count) + " " + rest;
}

// Cuts one piece of memory into equal parts, one for each rank.
std::vector<Slice> cut(const Slice& whole, int ranks) {
  std::vector<Slice> parts;
  const std::size_t bytes = whole.bytes / static_cast<std::size_t>(ranks);
  for (int rank = 0; rank < ranks; ++rank)
    parts.push_back(whole.part(static_cast<std::size_t>(rank) * bytes, bytes));
  return parts;
}

// tell() publishes a word through the store, hear() waits for one, meet() waits until all ranks are
// there.
void tell(Rank& rank, const std::string& word) { rank.store->set("test/" + word, {std::byte(1)}); }
void hear(Rank& rank, const std::string& word) { rank.store->get("test/" + word, soon()); }
void meet(Rank& rank, const std::string& word) {
  tell(rank, word + std::to_string(rank.rank));
  for (int other = 0; other < rank.size; ++other) hear(rank, word + std::to_string(other));
}

TEST_P(CommunicatorClaims, KnowsItsRankAndSize) {
  run([](Rank& rank) {
    EXPECT_EQ(rank.communicator->rank(), rank.rank);
    EXPECT_EQ(rank.communicator->size(), rank.size);
    EXPECT_FALSE(rank.communicator->backend().empty());
  });
}

TEST_P(CommunicatorClaims, BroadcastCopiesTheRootsBytes) {
  run([](Rank& rank) {
    for (const Dtype dtype : kDtypes) {
      for (const std::size_t count : kCounts) {
        for (int root = 0; root < rank.size; ++root) {
          Numbers data(rank, dtype, count, rank.rank);
          expect_done(rank.communicator->broadcast(data.elements(), root, data.pin(), Fence()),
                      "broadcast");
          expect_near(data.read(), start_of(dtype, count, root), 0, text_of(dtype, count));
        }
      }
    }
  });
}

TEST_P(CommunicatorClaims, AllReduceSupportsWhatItAnnounces) {
  run([](Rank& rank) {
    for (const Dtype dtype : kDtypes) {
      for (const ReduceOp op : kOps) {
        if (!rank.communicator->can_reduce(dtype, op)) continue;
        for (const std::size_t count : kCounts) {
          const std::string what = text_of(dtype, count, std::string(name(op)));
          Numbers data(rank, dtype, count, rank.rank);
          expect_done(rank.communicator->all_reduce(data.elements(), op, data.pin(), Fence()),
                      what);
          expect_near(data.read(), reduced(dtype, op, count, rank.size), tolerance_of(dtype), what);
        }
      }
    }
    EXPECT_TRUE(rank.communicator->can_reduce(Dtype::Float32, ReduceOp::Sum));
    EXPECT_TRUE(rank.communicator->can_reduce(Dtype::BFloat16, ReduceOp::Avg));
    EXPECT_TRUE(rank.communicator->can_reduce(Dtype::Int64, ReduceOp::Max));
  });
}

TEST_P(CommunicatorClaims, AllReduceIsBitwiseEqualOnAllRanks) {
  run([](Rank& rank) {
    constexpr std::size_t kCount = 1003;
    Numbers data(rank, Dtype::Float32, kCount);
    data.fill(
        [&](std::size_t i) { return 1.0 / (1.0 + static_cast<double>(i) + 7.7 * rank.rank); });
    expect_done(rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence()),
                "all_reduce");
    const auto ranks = static_cast<std::size_t>(rank.size);
    Numbers all(rank, Dtype::Float32, kCount * ranks);
    const auto outputs = cut(all.slice(), rank.size);
    expect_done(rank.communicator->all_gather(outputs, data.elements(), all.pin(), Fence()),
                "all_gather");
    const auto bytes = all.read_bytes();
    const auto own = data.read_bytes();
    for (std::size_t other = 0; other < ranks; ++other) {
      EXPECT_EQ(std::memcmp(bytes.data() + other * own.size(), own.data(), own.size()), 0)
          << "rank " << other;
    }
  });
}

TEST_P(CommunicatorClaims, ReduceChangesOnlyTheRootsBytes) {
  run([](Rank& rank) {
    for (const Dtype dtype :
         {Dtype::Float32, Dtype::Int64, Dtype::BFloat16, Dtype::ComplexFloat64}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
        if (!rank.communicator->can_reduce(dtype, op)) continue;
        for (int root = 0; root < rank.size; ++root) {
          const std::string what = text_of(dtype, 33, std::string(name(op)));
          Numbers data(rank, dtype, 33, rank.rank);
          expect_done(rank.communicator->reduce(data.elements(), root, op, data.pin(), Fence()),
                      what);
          const bool is_root = rank.rank == root;
          expect_near(data.read(),
                      is_root ? reduced(dtype, op, 33, rank.size) : start_of(dtype, 33, rank.rank),
                      is_root ? tolerance_of(dtype) : 0, what);
        }
      }
    }
  });
}

TEST_P(CommunicatorClaims, AllGatherOrdersPiecesByRank) {
  run([](Rank& rank) {
    for (const Dtype dtype : kDtypes) {
      for (const std::size_t count : kCounts) {
        const Numbers input(rank, dtype, count, rank.rank);
        Numbers whole(rank, dtype, count * static_cast<std::size_t>(rank.size));
        expect_done(rank.communicator->all_gather(cut(whole.slice(), rank.size), input.elements(),
                                                  whole.pin(), Fence()),
                    "all_gather into one piece");
        std::vector<Numbers> many;
        std::vector<Slice> outputs;
        for (int other = 0; other < rank.size; ++other) {
          outputs.push_back(many.emplace_back(rank, dtype, count).slice());
        }
        expect_done(rank.communicator->all_gather(outputs, input.elements(), input.pin(), Fence()),
                    "all_gather into many pieces");
        std::vector<double> expected;
        for (int other = 0; other < rank.size; ++other) {
          const auto theirs = start_of(dtype, count, other);
          expect_near(many[static_cast<std::size_t>(other)].read(), theirs, 0,
                      text_of(dtype, count));
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        expect_near(whole.read(), expected, 0, text_of(dtype, count));
      }
    }
  });
}

TEST_P(CommunicatorClaims, GatherAndScatterWorkForEveryRoot) {
  run([](Rank& rank) {
    for (const Dtype dtype : {Dtype::Float32, Dtype::Bool, Dtype::ComplexFloat64, Dtype::Int16}) {
      for (const std::size_t count : kCounts) {
        for (int root = 0; root < rank.size; ++root) {
          const bool is_root = rank.rank == root;
          const Numbers input(rank, dtype, count, rank.rank);
          Numbers all(rank, dtype, is_root ? count * static_cast<std::size_t>(rank.size) : 0);
          const auto parts = is_root ? cut(all.slice(), rank.size) : std::vector<Slice>();
          expect_done(rank.communicator->gather(parts, input.elements(), root, all.pin(), Fence()),
                      "gather");
          std::vector<double> expected;
          for (int other = 0; is_root && other < rank.size; ++other) {
            const auto theirs = start_of(dtype, count, other);
            expected.insert(expected.end(), theirs.begin(), theirs.end());
          }
          expect_near(all.read(), expected, 0, "gather of " + text_of(dtype, count));
          Numbers output(rank, dtype, count);
          expect_done(
              rank.communicator->scatter(output.elements(), parts, root, output.pin(), Fence()),
              "scatter");
          expect_near(output.read(), start_of(dtype, count, rank.rank), 0,
                      "scatter of " + text_of(dtype, count));
        }
      }
    }
  });
}

TEST_P(CommunicatorClaims, ReduceScatterGivesEachRankItsPart) {
  run([](Rank& rank) {
    for (const Dtype dtype :
         {Dtype::Float32, Dtype::BFloat16, Dtype::Int32, Dtype::ComplexFloat32}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min}) {
        if (!rank.communicator->can_reduce(dtype, op)) continue;
        for (const std::size_t count : kCounts) {
          const std::string what = text_of(dtype, count, std::string(name(op)));
          // Part r of every rank starts with that rank's numbers, salted with r.
          std::vector<Numbers> many;
          std::vector<Slice> inputs;
          for (int part = 0; part < rank.size; ++part) {
            inputs.push_back(many.emplace_back(rank, dtype, count, rank.rank, part).slice());
          }
          Numbers output(rank, dtype, count);
          expect_done(rank.communicator->reduce_scatter(output.elements(), inputs, op, output.pin(),
                                                        Fence()),
                      what);
          expect_near(output.read(), reduced(dtype, op, count, rank.size, rank.rank),
                      tolerance_of(dtype), what);
          for (int part = 0; part < rank.size; ++part) {
            expect_near(many[static_cast<std::size_t>(part)].read(),
                        start_of(dtype, count, rank.rank, part), 0, "the input of " + what);
          }
          const Numbers whole(rank, dtype, count * static_cast<std::size_t>(rank.size), rank.rank);
          expect_done(
              rank.communicator->reduce_scatter(output.elements(), cut(whole.slice(), rank.size),
                                                op, whole.pin(), Fence()),
              what + " in one piece");
          const auto all =
              reduced(dtype, op, count * static_cast<std::size_t>(rank.size), rank.size);
          const auto numbers = static_cast<std::ptrdiff_t>(output.count());
          const auto first = all.begin() + rank.rank * numbers;
          expect_near(output.read(), {first, first + numbers}, tolerance_of(dtype),
                      what + " in one piece");
        }
      }
    }
  });
}

// A number of elements for which a library once averaged wrongly on one rank.
TEST_P(CommunicatorClaims, AverageOfManyBFloat16IsRight) {
  run([](Rank& rank) {
    constexpr std::size_t kCount = 8193;
    const Numbers whole(rank, Dtype::BFloat16, kCount * static_cast<std::size_t>(rank.size),
                        rank.rank);
    Numbers output(rank, Dtype::BFloat16, kCount);
    expect_done(rank.communicator->reduce_scatter(output.elements(), cut(whole.slice(), rank.size),
                                                  ReduceOp::Avg, whole.pin(), Fence()),
                "reduce_scatter");
    const auto all = reduced(Dtype::BFloat16, ReduceOp::Avg,
                             kCount * static_cast<std::size_t>(rank.size), rank.size);
    const auto first = all.begin() + rank.rank * static_cast<std::ptrdiff_t>(kCount);
    expect_near(output.read(), {first, first + static_cast<std::ptrdiff_t>(kCount)},
                tolerance_of(Dtype::BFloat16), "average");
  });
}

TEST_P(CommunicatorClaims, AllToAllTakesUnequalAndZeroSizes) {
  run([](Rank& rank) {
    // Rank a sends (a + 2b) % 4 elements to rank b: none for some pairs.
    const auto elements = [](int from, int to) {
      return static_cast<std::size_t>((from + 2 * to) % 4);
    };
    for (const Dtype dtype : {Dtype::Float32, Dtype::UInt8, Dtype::ComplexFloat64}) {
      std::vector<Numbers> sent, received;
      std::vector<Slice> inputs, outputs;
      for (int other = 0; other < rank.size; ++other) {
        inputs.push_back(
            sent.emplace_back(rank, dtype, elements(rank.rank, other), rank.rank, other).slice());
        outputs.push_back(received.emplace_back(rank, dtype, elements(other, rank.rank)).slice());
      }
      expect_done(rank.communicator->all_to_all(outputs, inputs, dtype, Pin(), Fence()),
                  "all_to_all");
      for (int other = 0; other < rank.size; ++other) {
        expect_near(received[static_cast<std::size_t>(other)].read(),
                    start_of(dtype, elements(other, rank.rank), other, rank.rank), 0,
                    "from rank " + std::to_string(other));
      }
    }
  });
}

TEST_P(CommunicatorClaims, AllToAllOfOnePieceSwapsItsParts) {
  run([](Rank& rank) {
    constexpr std::size_t kCount = 5;
    const std::size_t all = kCount * static_cast<std::size_t>(rank.size);
    const Numbers input(rank, Dtype::Int32, all, rank.rank);
    Numbers output(rank, Dtype::Int32, all);
    expect_done(
        rank.communicator->all_to_all(cut(output.slice(), rank.size), cut(input.slice(), rank.size),
                                      Dtype::Int32, output.pin(), Fence()),
        "all_to_all");
    const auto numbers = output.read();
    for (std::size_t i = 0; i < all; ++i) {
      const auto from = static_cast<int>(i / kCount);
      const std::size_t at = static_cast<std::size_t>(rank.rank) * kCount + i % kCount;
      EXPECT_EQ(numbers[i], number_of(Dtype::Int32, from, at)) << i;
    }
  });
}

TEST_P(CommunicatorClaims, MessagesOfAPairArriveInOrder) {
  run([](Rank& rank) {
    PointToPoint* const messages = rank.communicator->point_to_point();
    if (messages == nullptr || rank.size < 2) return;
    constexpr int kMessages = 20;
    std::vector<Numbers> data;
    std::vector<Op> ops;
    for (int i = 0; i < kMessages && rank.rank < 2; ++i) {
      // Sizes differ, so that two swapped messages would not fit.
      const auto elements = static_cast<std::size_t>(1 + i);
      if (rank.rank == 0) {
        data.emplace_back(rank, Dtype::Float64, elements, 0, i);
        ops.push_back(messages->send(data.back().elements(), 1, 0, data.back().pin(), Fence()));
      } else {
        data.emplace_back(rank, Dtype::Float64, elements);
        ops.push_back(messages->recv(data.back().elements(), 0, 0, data.back().pin(), Fence()));
      }
    }
    for (const Op& op : ops) expect_done(op, "message");
    for (int i = 0; i < kMessages && rank.rank == 1; ++i) {
      expect_near(data[static_cast<std::size_t>(i)].read(),
                  start_of(Dtype::Float64, static_cast<std::size_t>(1 + i), 0, i), 0,
                  "message " + std::to_string(i));
    }
  });
}

TEST_P(CommunicatorClaims, AllPairsCanExchangeAtOnce) {
  run([](Rank& rank) {
    PointToPoint* const messages = rank.communicator->point_to_point();
    if (messages == nullptr) return;
    std::vector<Numbers> data;
    std::vector<Op> ops;
    for (int other = 0; other < rank.size; ++other) {
      if (other == rank.rank) continue;
      data.emplace_back(rank, Dtype::Int32, 10, rank.rank, other);
      ops.push_back(messages->send(data.back().elements(), other, 0, data.back().pin(), Fence()));
    }
    std::vector<Numbers> received;
    std::vector<int> from;
    for (int other = 0; other < rank.size; ++other) {
      if (other == rank.rank) continue;
      received.emplace_back(rank, Dtype::Int32, 10);
      from.push_back(other);
      ops.push_back(
          messages->recv(received.back().elements(), other, 0, received.back().pin(), Fence()));
    }
    for (const Op& op : ops) expect_done(op, "message");
    for (std::size_t i = 0; i < from.size(); ++i) {
      expect_near(received[i].read(), start_of(Dtype::Int32, 10, from[i], rank.rank), 0,
                  "from " + std::to_string(from[i]));
    }
  });
}

TEST_P(CommunicatorClaims, TagsMatchMessagesOrAreRefused) {
  run([](Rank& rank) {
    PointToPoint* const messages = rank.communicator->point_to_point();
    if (messages == nullptr || rank.size < 2 || rank.rank > 1) return;
    if (!messages->has_tags()) {
      const Numbers data(rank, Dtype::Float32, 1);
      const Op op = rank.rank == 0 ? messages->send(data.elements(), 1, 3, data.pin(), Fence())
                                   : messages->recv(data.elements(), 0, 3, data.pin(), Fence());
      EXPECT_EQ(expect_failed(op, "a tag").blame(), Blame::Unsupported);
      return;
    }
    Numbers first(rank, Dtype::Float32, 4, rank.rank, 1),
        second(rank, Dtype::Float32, 4, rank.rank, 2);
    std::vector<Op> ops;
    if (rank.rank == 0) {
      ops.push_back(messages->send(first.elements(), 1, 1, first.pin(), Fence()));
      ops.push_back(messages->send(second.elements(), 1, 2, second.pin(), Fence()));
    } else {  // received in the opposite order
      ops.push_back(messages->recv(second.elements(), 0, 2, second.pin(), Fence()));
      ops.push_back(messages->recv(first.elements(), 0, 1, first.pin(), Fence()));
    }
    for (const Op& op : ops) expect_done(op, "message");
    expect_near(first.read(), start_of(Dtype::Float32, 4, 0, 1), 0, "tag 1");
    expect_near(second.read(), start_of(Dtype::Float32, 4, 0, 2), 0, "tag 2");
  });
}

TEST_P(CommunicatorClaims, AnySourceRecvLearnsSourceOrFails) {
  run([](Rank& rank) {
    PointToPoint* const messages = rank.communicator->point_to_point();
    if (messages == nullptr || rank.size < 2) return;
    Numbers data(rank, Dtype::Int32, 3, rank.rank);
    if (!messages->has_any_source()) {
      const Op op = messages->recv(data.elements(), transport::kAnySource, 0, data.pin(), Fence());
      EXPECT_EQ(expect_failed(op, "any source").blame(), Blame::Unsupported);
      return;
    }
    if (rank.rank != 0) {
      expect_done(messages->send(data.elements(), 0, 5, data.pin(), Fence()), "send");
      return;
    }
    std::vector<int> sources;
    for (int i = 1; i < rank.size; ++i) {
      const Op op = messages->recv(data.elements(), transport::kAnySource, 5, data.pin(), Fence());
      expect_done(op, "recv from any rank");
      sources.push_back(op.source_rank());
      expect_near(data.read(), start_of(Dtype::Int32, 3, op.source_rank()), 0, "its data");
    }
    std::sort(sources.begin(), sources.end());
    std::vector<int> others(static_cast<std::size_t>(rank.size - 1));
    std::iota(others.begin(), others.end(), 1);
    EXPECT_EQ(sources, others);
  });
}

TEST_P(CommunicatorClaims, ManyOperationsInFlightKeepApart) {
  run([](Rank& rank) {
    constexpr int kOperations = 120;
    std::vector<Numbers> data;
    std::vector<Op> ops;
    data.reserve(kOperations);
    for (int i = 0; i < kOperations; ++i) {
      data.emplace_back(rank, Dtype::Int32, 16, rank.rank, i);
      const Numbers& mine = data.back();
      const bool reduces = i % 2 == 0;
      ops.push_back(
          reduces
              ? rank.communicator->all_reduce(mine.elements(), ReduceOp::Sum, mine.pin(), Fence())
              : rank.communicator->broadcast(mine.elements(), i % rank.size, mine.pin(), Fence()));
    }
    for (const Op& op : ops) expect_done(op, "one of many");
    for (int i = 0; i < kOperations; ++i) {
      const auto expected = i % 2 == 0 ? reduced(Dtype::Int32, ReduceOp::Sum, 16, rank.size, i)
                                       : start_of(Dtype::Int32, 16, i % rank.size, i);
      expect_near(data[static_cast<std::size_t>(i)].read(), expected, 0,
                  "operation " + std::to_string(i));
    }
  });
}

TEST_P(CommunicatorClaims, ThreadsMayTakeTurnsIssuing) {
  run([](Rank& rank) {
    for (int i = 0; i < 5; ++i) {
      Numbers data(rank, Dtype::Float32, 8, rank.rank);
      Op op;
      std::thread([&] {
        op = rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence());
      }).join();
      expect_done(op, "all_reduce of another thread");
      expect_near(data.read(), reduced(Dtype::Float32, ReduceOp::Sum, 8, rank.size), 0, "its data");
    }
  });
}

TEST_P(CommunicatorClaims, BarrierAwaitsAllRanksAndEarlierWork) {
  run([](Rank& rank) {
    Numbers data(rank, Dtype::Float32, 1000, rank.rank);
    // The last rank enters once rank 0 has been seen waiting.
    const bool is_last = rank.rank == rank.size - 1;
    if (is_last && rank.size > 1) hear(rank, "seen");
    const Op earlier =
        rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence());
    const Op op = rank.communicator->barrier(Fence());
    if (rank.rank == 0 && rank.size > 1) {
      EXPECT_FALSE(op.done().query());
      tell(rank, "seen");
    }
    expect_done(op, "barrier");
    EXPECT_TRUE(earlier.done().query());
    expect_near(data.read(), reduced(Dtype::Float32, ReduceOp::Sum, 1000, rank.size), 0,
                "the earlier work");
  });
}

TEST_P(CommunicatorClaims, AllReduceReadsOnlyAfterReady) {
  run([](Rank& rank) {
    Numbers data(rank, Dtype::Float32, 100);
    const Gate gate = rank.gate();
    const Op op =
        rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), gate.fence);
    // All ranks have issued it, and none may have read another's zeros.
    meet(rank, "issued");
    EXPECT_FALSE(op.done().query());
    data.fill([&](std::size_t i) { return number_of(Dtype::Float32, rank.rank, i); });
    gate.open();
    expect_done(op, "all_reduce");
    expect_near(data.read(), reduced(Dtype::Float32, ReduceOp::Sum, 100, rank.size), 0,
                "what was written before it was ready");
  });
}

TEST_P(CommunicatorClaims, NoCollectiveReadsBeforeReady) {
  run([](Rank& rank) {
    constexpr Dtype kType = Dtype::Float32;
    constexpr std::size_t kCount = 20;
    const auto ranks = static_cast<std::size_t>(rank.size);
    Communicator& all = *rank.communicator;
    struct Call {
      const char* name;
      std::function<Op(const Numbers& from, const Numbers& to, const Fence& ready)> begin;
      bool in_place;
      std::vector<double> expected;
    };
    // Returns this rank's part of a buffer that has a part for every rank.
    const auto own_part = [&](const std::vector<double>& whole) {
      const auto first = whole.begin() + static_cast<std::ptrdiff_t>(kCount) * rank.rank;
      return std::vector<double>(first, first + static_cast<std::ptrdiff_t>(kCount));
    };
    std::vector<double> gathered, swapped;
    for (int other = 0; other < rank.size; ++other) {
      const auto theirs = start_of(kType, kCount * ranks, other);
      gathered.insert(gathered.end(), theirs.begin(), theirs.end());
      const auto part = own_part(theirs);
      swapped.insert(swapped.end(), part.begin(), part.end());
    }
    const int root = rank.size - 1;
    const auto sums = reduced(kType, ReduceOp::Sum, kCount * ranks, rank.size);
    const Call calls[] = {
        {"broadcast",
         [&](auto& from, auto&, auto& ready) {
           return all.broadcast(from.elements(), root, from.pin(), ready);
         },
         true, start_of(kType, kCount * ranks, root)},
        {"reduce",
         [&](auto& from, auto&, auto& ready) {
           return all.reduce(from.elements(), root, ReduceOp::Sum, from.pin(), ready);
         },
         true, rank.rank == root ? sums : start_of(kType, kCount * ranks, rank.rank)},
        {"all_gather",
         [&](auto& from, auto& to, auto& ready) {
           return all.all_gather(cut(to.slice(), rank.size), from.elements(), to.pin(), ready);
         },
         false, gathered},
        {"reduce_scatter",
         [&](auto& from, auto& to, auto& ready) {
           return all.reduce_scatter(to.elements(), cut(from.slice(), rank.size), ReduceOp::Sum,
                                     to.pin(), ready);
         },
         false, own_part(sums)},
        {"all_to_all",
         [&](auto& from, auto& to, auto& ready) {
           return all.all_to_all(cut(to.slice(), rank.size), cut(from.slice(), rank.size), kType,
                                 to.pin(), ready);
         },
         false, swapped},
    };
    for (const Call& call : calls) {
      Numbers from(rank, kType, kCount * ranks);
      Numbers to(rank, kType, call.in_place ? 0 : call.expected.size());
      const Gate gate = rank.gate();
      const Op op = call.begin(from, to, gate.fence);
      meet(rank, call.name);  // all ranks have issued it, and none may have read another's zeros
      EXPECT_FALSE(op.done().query()) << call.name;
      from.fill([&](std::size_t i) { return number_of(kType, rank.rank, i); });
      gate.open();
      expect_done(op, call.name);
      expect_near((call.in_place ? from : to).read(), call.expected, 0, call.name);
    }
  });
}

TEST_P(CommunicatorClaims, OperationsBehindAnUnreadyOneKeepOrder) {
  run([](Rank& rank) {
    Numbers first(rank, Dtype::Float32, 10, rank.rank, 1),
        second(rank, Dtype::Float32, 20, rank.rank, 2);
    const Gate gate = rank.gate();
    const Op one = rank.communicator->all_reduce(first.elements(), ReduceOp::Sum, first.pin(),
                                                 rank.rank == 0 ? gate.fence : Fence());
    const Op two =
        rank.communicator->all_reduce(second.elements(), ReduceOp::Sum, second.pin(), Fence());
    meet(rank, "issued");
    gate.open();
    expect_done(one, "the first");
    expect_done(two, "the second");
    expect_near(first.read(), reduced(Dtype::Float32, ReduceOp::Sum, 10, rank.size, 1), 0,
                "the first");
    expect_near(second.read(), reduced(Dtype::Float32, ReduceOp::Sum, 20, rank.size, 2), 0,
                "the second");
  });
}

TEST_P(CommunicatorClaims, PinIsReleasedWhenDone) {
  run([](Rank& rank) {
    const auto freed = std::make_shared<HostFlag>();
    Pin token(new int, [freed](const int* memory) {
      delete memory;
      freed->raise();
    });
    Numbers data(rank, Dtype::Float32, 10, rank.rank);
    const Gate gate = rank.gate();
    const Op op =
        rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, std::move(token), gate.fence);
    EXPECT_FALSE(freed->query());
    gate.open();
    expect_done(op, "all_reduce");
    EXPECT_TRUE(freed->synchronize(soon()));
  });
}

TEST_P(CommunicatorClaims, AbortFailsPendingAndLaterOperations) {
  run([](Rank& rank) {
    if (rank.rank != 0) return hear(rank, "aborted");  // never enters the operation
    Numbers data(rank, Dtype::Float32, 10, rank.rank);
    const Gate gate = rank.gate();
    std::vector<Op> ops;
    if (rank.size > 1) {
      ops.push_back(
          rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence()));
      ops.push_back(rank.communicator->barrier(Fence()));
    } else {
      ops.push_back(
          rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), gate.fence));
    }
    rank.communicator->abort(Error(Blame::Cancelled, "the test has had enough"));
    rank.communicator->abort(Error(Blame::Cancelled, "twice"));
    gate.open();
    ops.push_back(rank.communicator->broadcast(data.elements(), 0, data.pin(), Fence()));
    for (const Op& op : ops) {
      const Error error = expect_failed(op, "an aborted operation");
      EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("the test has had enough"));
    }
    tell(rank, "aborted");
  });
}

TEST_P(CommunicatorClaims, MissingRankTimesOutTheOperation) {
  const auto timeout = GetParam()->short_timeout();
  run(timeout, [timeout](Rank& rank) {
    if (rank.size < 2) return;
    if (rank.rank != 0) return hear(rank, "failed");
    Numbers data(rank, Dtype::Float32, 10, rank.rank);
    const Op op =
        rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence());
    const Error error = expect_failed(op, "an operation that no other rank enters");
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("all_reduce"));
    EXPECT_THAT(error.text(), HasSubstr("rank 0 of"));
    EXPECT_THAT(error.text(), HasSubstr(describe(timeout)));
    tell(rank, "failed");
  });
}

TEST_P(CommunicatorClaims, EndedPeerFailsPendingOperations) {
  const bool sees = GetParam()->sees_peers_end();
  run(sees ? std::chrono::milliseconds(60'000) : GetParam()->short_timeout(), [sees](Rank& rank) {
    if (rank.size < 2) return;
    Numbers data(rank, Dtype::Float32, 10, rank.rank);
    // One collective first, so that all ranks are connected.
    expect_done(rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence()),
                "the first");
    meet(rank, "together");
    if (rank.rank == rank.size - 1) {
      rank.communicator.reset();
      return hear(rank, "failed");
    }
    const Op op =
        rank.communicator->all_reduce(data.elements(), ReduceOp::Sum, data.pin(), Fence());
    const Error error = expect_failed(op, "an operation whose peer has ended");
    EXPECT_TRUE(error.blame() == Blame::PeerLost || (!sees && error.blame() == Blame::Timeout))
        << error.what();
    if (rank.rank == 0) tell(rank, "failed");
  });
}

}  // namespace
}  // namespace weft::conformance
