// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include <torch/types.h>
#include <torch/utils.h>

#include <weft/group.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/tests/harness/on_ranks.h>
#include <weft/tests/harness/sanitized.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::Setting;

// Every collective, with ranks as threads and as processes.
class Collectives : public harness::OnRanks {};

INSTANTIATE_TEST_SUITE_P(, Collectives,
                         testing::Values(Setting{As::Threads, "gloo"},
                                         Setting{As::Processes, "gloo"},
                                         Setting{As::Threads, "tcp"},
                                         Setting{As::Processes, "shm"}),
                         harness::name_of_setting);
// Behaviour of Gloo only.
class GlooCollectives : public Collectives {};
INSTANTIATE_TEST_SUITE_P(, GlooCollectives,
                         testing::Values(Setting{As::Threads, "gloo"},
                                         Setting{As::Processes, "gloo"}),
                         harness::name_of_setting);

constexpr at::ScalarType kMovable[] = {
    at::kByte,          at::kChar,     at::kShort,  at::kInt,           at::kLong,
    at::kHalf,          at::kBFloat16, at::kFloat,  at::kDouble,        at::kComplexFloat,
    at::kComplexDouble, at::kBool,     at::kUInt16, at::kFloat8_e4m3fn, at::kFloat8_e5m2};

// Small values that every dtype holds exactly, different for each rank.
at::Tensor values_of(int rank, at::ScalarType dtype, std::int64_t count = 5) {
  const auto numbers = torch::arange(count) + rank + 1;
  return dtype == at::kBool ? (numbers % 2).to(at::kBool) : numbers.to(dtype);
}

// Compares bit for bit: some dtypes cannot be compared otherwise.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

TEST_P(Collectives, BroadcastGivesTheRootsValues) {
  on_ranks(3, [](ProcessGroup& group) {
    for (const auto dtype : kMovable) {
      for (int root = 0; root < group.size(); ++root) {
        const auto tensor = values_of(group.rank(), dtype);
        group.broadcast(tensor, root).wait();
        EXPECT_TRUE(same(tensor, values_of(root, dtype))) << dtype << ", root " << root;
      }
    }
  });
}

TEST_P(Collectives, AllReduceAppliesEveryOperator) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto reduced = [&](const at::Tensor& mine, ReduceOp op) {
      group.all_reduce(mine, op).wait();
      return mine;
    };
    const auto mine = [&] {
      return torch::tensor({group.rank() + 1.0, 4.0 - group.rank()}, at::kDouble);
    };
    EXPECT_TRUE(same(reduced(mine(), ReduceOp::Sum), torch::tensor({6.0, 9.0}, at::kDouble)));
    EXPECT_TRUE(same(reduced(mine(), ReduceOp::Avg), torch::tensor({2.0, 3.0}, at::kDouble)));
    EXPECT_TRUE(same(reduced(mine(), ReduceOp::Product), torch::tensor({6.0, 24.0}, at::kDouble)));
    EXPECT_TRUE(same(reduced(mine(), ReduceOp::Min), torch::tensor({1.0, 2.0}, at::kDouble)));
    EXPECT_TRUE(same(reduced(mine(), ReduceOp::Max), torch::tensor({3.0, 4.0}, at::kDouble)));
    const auto bits = [&] {
      return torch::tensor({1 << group.rank(), 7 ^ (1 << group.rank())}, at::kInt);
    };
    EXPECT_TRUE(same(reduced(bits(), ReduceOp::BitOr), torch::tensor({7, 7}, at::kInt)));
    EXPECT_TRUE(same(reduced(bits(), ReduceOp::BitAnd), torch::tensor({0, 0}, at::kInt)));
    EXPECT_TRUE(same(reduced(bits(), ReduceOp::BitXor), torch::tensor({7, 0}, at::kInt)));
    EXPECT_TRUE(same(reduced(mine(), ReduceOp()), torch::tensor({6.0, 9.0}, at::kDouble)))
        << "the default is the sum";
  });
}

TEST_P(Collectives, AllReduceAddsEveryDtype) {
  on_ranks(2, [](ProcessGroup& group) {
    for (const auto dtype : {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                             at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
      const auto tensor = values_of(group.rank(), dtype);
      group.all_reduce(tensor).wait();
      EXPECT_TRUE(same(tensor, values_of(0, dtype) + values_of(1, dtype))) << dtype;
    }
    const auto truth = torch::tensor({group.rank() == 0, true, false});
    group.all_reduce(truth).wait();
    EXPECT_TRUE(same(truth, torch::tensor({true, true, false})))
        << "the sum of truth values is their or";
    const auto both = torch::tensor({group.rank() == 0, true, false});
    group.all_reduce(both, ReduceOp::Product).wait();
    EXPECT_TRUE(same(both, torch::tensor({false, true, false}))) << "and the product their and";
  });
}

TEST_P(GlooCollectives, UnsupportedReductionsAreRefused) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 0) {  // alone: the other rank takes part in none of these
      for (const auto& [dtype, op, words] :
           std::vector<std::tuple<at::ScalarType, ReduceOp, std::string>>{
               {at::kInt, ReduceOp::Avg, "int32 with Avg"},
               {at::kFloat, ReduceOp::BitAnd, "float32 with BitAnd"},
               {at::kComplexFloat, ReduceOp::Product, "complex64 with Product"},
               {at::kShort, ReduceOp::Sum, "int16 with Sum"},
               {at::kFloat8_e4m3fn, ReduceOp::Sum, "float8_e4m3fn with Sum"}}) {
        const auto error =
            error_of([&] { static_cast<void>(group.all_reduce(torch::zeros({2}, dtype), op)); });
        EXPECT_EQ(error.blame(), Blame::Unsupported) << error.what();
        EXPECT_NE(error.text().find("'gloo' cannot reduce " + words), std::string::npos)
            << error.text();
      }
    }
    const auto tensor = torch::ones({1});
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST_P(Collectives, HalfPrecisionSumsLikeGatherAndAdd) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto tensor = torch::full({16}, 32'000.0, at::kHalf) + group.rank() * 16;
    const std::vector<at::Tensor> all{torch::empty_like(tensor), torch::empty_like(tensor)};
    group.all_gather(all, tensor).wait();
    group.all_reduce(tensor).wait();
    EXPECT_TRUE(same(tensor, all[0] + all[1]));
    EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>());
  });
}

TEST_P(Collectives, AllReduceIsBitwiseEqualOnAllRanks) {
  on_ranks(3, [](ProcessGroup& group) {
    torch::manual_seed(group.rank());
    const auto tensor = torch::randn({10'007});
    group.all_reduce(tensor).wait();
    const auto all = torch::empty({3 * 10'007});
    group.all_gather_into(all, tensor).wait();
    for (const auto& part : all.chunk(3)) EXPECT_TRUE(same(part.contiguous(), tensor));
  });
}

TEST_P(Collectives, ReduceChangesTheRootsTensorOnly) {
  on_ranks(3, [](ProcessGroup& group) {
    for (int root = 0; root < 3; ++root) {
      for (const auto& [op, expected] : std::map<ReduceOp, double>{{ReduceOp::Sum, 6},
                                                                   {ReduceOp::Avg, 2},
                                                                   {ReduceOp::Product, 6},
                                                                   {ReduceOp::Min, 1},
                                                                   {ReduceOp::Max, 3}}) {
        const auto tensor = torch::full({4}, group.rank() + 1.0);
        group.reduce(tensor, root, op).wait();
        const double value = group.rank() == root ? expected : group.rank() + 1.0;
        EXPECT_TRUE(same(tensor, torch::full({4}, value))) << "root " << root << ", " << name(op);
      }
      for (const auto& [op, expected] : std::map<ReduceOp, int>{
               {ReduceOp::BitAnd, 8}, {ReduceOp::BitOr, 15}, {ReduceOp::BitXor, 15}}) {
        const int own = 8 | 1 << group.rank();
        const auto tensor = torch::full({4}, own, at::kInt);
        group.reduce(tensor, root, op).wait();
        const int value = group.rank() == root ? expected : own;
        EXPECT_TRUE(same(tensor, torch::full({4}, value, at::kInt)))
            << "root " << root << ", " << name(op);
      }
    }
  });
}

TEST_P(Collectives, AllGatherCollectsInRankOrder) {
  on_ranks(3, [](ProcessGroup& group) {
    for (const auto dtype : kMovable) {
      const auto input = values_of(group.rank(), dtype);
      std::vector<at::Tensor> outputs;
      for (int rank = 0; rank < 3; ++rank) outputs.push_back(torch::empty_like(input));
      const auto flat = torch::empty({15}, dtype);
      group.all_gather(outputs, input).wait();
      group.all_gather_into(flat, input).wait();
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(same(outputs[static_cast<std::size_t>(rank)], values_of(rank, dtype))) << dtype;
        EXPECT_TRUE(same(flat.narrow(0, 5 * rank, 5), values_of(rank, dtype))) << dtype;
      }
    }
  });
}

TEST_P(Collectives, ReduceAndGatherTakeBools) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto mine = [&] { return torch::tensor({group.rank() == 1, true, false}); };
    const auto reduced = mine();
    group.reduce(reduced, 2).wait();
    EXPECT_TRUE(same(reduced, group.rank() == 2 ? torch::tensor({true, true, false}) : mine()));
    const auto all = torch::zeros({9}, at::kBool);
    group.gather(group.rank() == 2 ? all.chunk(3) : std::vector<at::Tensor>(), mine(), 2).wait();
    if (group.rank() == 2) {
      EXPECT_TRUE(
          same(all, torch::tensor({false, true, false, true, true, false, false, true, false})));
    }
  });
}

TEST_P(Collectives, ComplexAndRealViewsMixInGathers) {
  on_ranks(2, [](ProcessGroup& group) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto pairs_of = [&](int rank) {
        return (torch::arange(6).view({3, 2}) + 10 * rank).to(dtype);
      };
      const auto real = pairs_of(group.rank());
      const auto complex = torch::view_as_complex(pairs_of(group.rank()));
      const auto expect = [&](const at::Tensor& got, int rank) {
        EXPECT_TRUE(
            same(got.is_complex() ? torch::view_as_real(got).contiguous() : got, pairs_of(rank)))
            << got;
      };
      for (const at::Tensor& input : {real, complex}) {
        const auto reals = [&] { return torch::zeros({3, 2}, dtype); };
        const auto complexes = [&] { return torch::zeros({3}, c10::toComplexType(dtype)); };
        for (const std::vector<at::Tensor>& outputs : {std::vector<at::Tensor>{reals(), reals()},
                                                       {reals(), complexes()},
                                                       {complexes(), complexes()}}) {
          group.all_gather(outputs, input).wait();
          for (int rank = 0; rank < 2; ++rank)
            expect(outputs[static_cast<std::size_t>(rank)], rank);
        }
        for (const auto& flat :
             {torch::zeros({6, 2}, dtype), torch::zeros({6}, c10::toComplexType(dtype))}) {
          group.all_gather_into(flat, input).wait();
          for (int rank = 0; rank < 2; ++rank) expect(flat.narrow(0, 3 * rank, 3), rank);
        }
        std::vector<at::Tensor> gathered;
        if (group.rank() == 1) gathered = {complexes(), reals()};
        group.gather(gathered, input, 1).wait();
        for (std::size_t rank = 0; rank < gathered.size(); ++rank)
          expect(gathered[rank], static_cast<int>(rank));
      }
      // One rank may pass the complex tensor and the other its real view.
      const auto mixed = torch::zeros({6, 2}, dtype);
      group.all_gather_into(mixed, group.rank() == 0 ? complex : real).wait();
      for (int rank = 0; rank < 2; ++rank) expect(mixed.narrow(0, 3 * rank, 3), rank);
      // Other shapes and another precision remain errors.
      const auto error = error_of([&] {
        static_cast<void>(
            group.all_gather({real, real}, torch::ones({6}, c10::toComplexType(dtype))));
      });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      const auto other = complex.to(dtype == at::kFloat ? at::kComplexDouble : at::kComplexFloat);
      EXPECT_EQ(error_of([&] {
                  static_cast<void>(group.all_gather({real, real}, other));
                }).blame(),
                Blame::Caller);
    }
  });
}

TEST_P(Collectives, GatherAndScatterAreInverse) {
  on_ranks(3, [](ProcessGroup& group) {
    for (int root = 0; root < 3; ++root) {
      const bool is_root = group.rank() == root;
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < 3 && is_root; ++rank)
        parts.push_back(torch::empty({2, 2}, at::kLong));
      const auto mine = torch::full({2, 2}, 10 * root + group.rank(), at::kLong);
      group.gather(parts, mine, root).wait();
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        EXPECT_TRUE(
            same(parts[rank], torch::full({2, 2}, 10 * root + static_cast<int>(rank), at::kLong)));
      }
      const auto back = torch::zeros({2, 2}, at::kLong);
      group.scatter(back, parts, root).wait();
      EXPECT_TRUE(same(back, mine)) << "root " << root;
    }
  });
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsPart) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto input =
        torch::arange(6).to(at::kFloat) + group.rank();  // the sum over ranks: 3 i + 3
    const auto own = torch::tensor(
        {2.f * static_cast<float>(group.rank()), 2.f * static_cast<float>(group.rank()) + 1});
    const auto output = torch::zeros({2});
    group.reduce_scatter_into(output, input).wait();
    EXPECT_TRUE(same(output, own * 3 + 3));
    group.reduce_scatter(output, input.chunk(3), ReduceOp::Avg).wait();
    EXPECT_TRUE(same(output, own + 1));
    group.reduce_scatter(output, input.chunk(3), ReduceOp::Max).wait();
    EXPECT_TRUE(same(output, own + 2));
    EXPECT_TRUE(same(input, torch::arange(6).to(at::kFloat) + group.rank()))
        << "inputs are only read";
  });
}

TEST_P(Collectives, ReduceScatterTakesUnevenParts) {
  on_ranks(3, [](ProcessGroup& group) {
    std::vector<at::Tensor> inputs;  // of 0, 1 and 2 elements
    for (int rank = 0; rank < 3; ++rank) inputs.push_back(torch::full({rank}, group.rank() + 1.0));
    const auto output = torch::zeros({group.rank()});
    group.reduce_scatter(output, inputs).wait();
    EXPECT_TRUE(same(output, torch::full({group.rank()}, 6.0)));
  });
}

TEST_P(Collectives, AllToAllTransposesUnevenParts) {
  on_ranks(3, [](ProcessGroup& group) {
    // Rank r sends 2 r + p elements of value 10 r + p to rank p.
    const auto part = [](int from, int to) {
      return torch::full({2 * from + to}, 10 * from + to, at::kInt);
    };
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int peer = 0; peer < 3; ++peer) {
      inputs.push_back(part(group.rank(), peer));
      outputs.push_back(torch::zeros({2 * peer + group.rank()}, at::kInt));
    }
    group.all_to_all(outputs, inputs).wait();
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(same(outputs[static_cast<std::size_t>(peer)], part(peer, group.rank())))
          << "from " << peer;
    }
    // Adjacent parts of one tensor.
    const auto from = torch::arange(3) + 3 * group.rank();
    const auto to = torch::zeros({3}, at::kLong);
    group.all_to_all(to.chunk(3), from.chunk(3)).wait();
    EXPECT_TRUE(same(to, torch::arange(3) * 3 + group.rank()));
  });
}

TEST_P(Collectives, RankWithoutDataJoinsAllToAll) {
  on_ranks(3, [](ProcessGroup& group) {
    // Ranks 0 and 1 exchange; rank 2 has empty parts only.
    const auto size = [](int one, int other) { return one == 2 || other == 2 ? 0 : 4; };
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int peer = 0; peer < 3; ++peer) {
      inputs.push_back(torch::full({size(group.rank(), peer)}, group.rank() + 1, at::kInt));
      outputs.push_back(torch::zeros({size(group.rank(), peer)}, at::kInt));
    }
    group.all_to_all(outputs, inputs).wait();
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(same(outputs[static_cast<std::size_t>(peer)],
                       torch::full({size(group.rank(), peer)}, peer + 1, at::kInt)));
    }
  });
}

// Like all other calls, this one writes the bytes and does not involve autograd.
TEST_P(Collectives, UnevenPartsReduceIntoAnyTensor) {
  on_ranks(2, [](ProcessGroup& group) {
    const std::int64_t size = 1 + group.rank();
    const auto parts = [] { return std::vector<at::Tensor>{torch::ones({1}), torch::ones({2})}; };
    const auto leaf = torch::zeros({size}, at::requires_grad());
    group.reduce_scatter(leaf, parts()).wait();
    EXPECT_TRUE(same(leaf.detach(), torch::full({size}, 2.0)));
    at::Tensor inference;
    {
      const c10::InferenceMode mode;
      inference = torch::zeros({size});
    }
    group.reduce_scatter(inference, parts()).wait();
    EXPECT_TRUE(same(inference, torch::full({size}, 2.0)));
  });
}

TEST_P(Collectives, BrokenGroupLeavesTheOutputAlone) {
  on_ranks(2, [](ProcessGroup& group) {
    harness::meet(group);
    group.abort("over");
    const std::int64_t size = 1 + group.rank();
    const auto output = torch::zeros({size});
    const auto error = error_of([&] {
      static_cast<void>(group.reduce_scatter(output, {torch::ones({1}), torch::ones({2})}));
    });
    EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
    EXPECT_TRUE(same(output, torch::zeros({size})));
    // Rank 0 may host the store, through which the other rank may still be meeting it.
    group.store()->set("over " + std::to_string(group.rank()), std::string("yes"));
    if (group.rank() == 0) group.store()->wait({"over 1"});
  });
}

TEST_P(Collectives, EmptyTensorsAreLegalEverywhere) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto none = torch::empty({0, 3});
    const bool is_root = group.rank() == 0;
    const std::vector<at::Tensor> two{torch::empty({0, 3}), torch::empty({0, 3})};
    const std::vector<at::Tensor> on_root = is_root ? two : std::vector<at::Tensor>();
    group.broadcast(none, 1).wait();
    group.all_reduce(none).wait();
    group.reduce(none, 0).wait();
    group.all_gather(two, none).wait();
    group.all_gather_into(torch::empty({0, 3}), none).wait();
    group.gather(on_root, none, 0).wait();
    group.scatter(none, on_root, 0).wait();
    group.reduce_scatter(none, two).wait();
    group.reduce_scatter_into(none, torch::empty({0})).wait();
    group.all_to_all(two, {none, none}).wait();
    const auto tensor = torch::ones({1});
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2) << "the group works afterwards";
  });
}

TEST_P(Collectives, TakeTensorsWithoutDimensions) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto number = [&](double of = 0) { return torch::full({}, of); };
    const double mine = group.rank() + 1;
    const auto sum = number(mine), first = number(mine);
    group.all_reduce(sum).wait();
    group.broadcast(first, 0).wait();
    std::vector<at::Tensor> all{number(), number()}, crossed{number(), number()};
    group.all_gather(all, number(mine)).wait();
    const auto flat = torch::zeros({2}), part = number();
    group.all_gather_into(flat, number(mine)).wait();
    group.reduce_scatter_into(part, flat).wait();
    group.all_to_all(crossed, {number(10 * mine), number(10 * mine + 1)}).wait();
    EXPECT_EQ(sum.item<float>(), 3);
    EXPECT_EQ(first.item<float>(), 1);
    EXPECT_EQ(all[1].item<float>(), 2);
    EXPECT_TRUE(same(flat, torch::tensor({1.F, 2.F})));
    EXPECT_EQ(part.item<float>(), 2 * static_cast<float>(mine));
    EXPECT_EQ(crossed[1].item<float>(), static_cast<float>(20 + group.rank()));
    EXPECT_TRUE(sum.dim() == 0 && all[1].dim() == 0);
  });
}

// A thousand calls of each kind at a time, with the roots in turn. In call c, the number of rank r
// is 3 c + r.
TEST_P(Collectives, ManyCallsInFlightKeepTheirResults) {
  on_ranks(3, [](ProcessGroup& group) {
    constexpr int kCalls = harness::kSanitized ? 100 : 1000;
    const int rank = group.rank();
    const auto number = [](int call, int of) { return torch::full({1}, 3 * call + of, at::kInt); };
    const auto numbers = [&](int call) { return torch::arange(3 * call, 3 * call + 3, at::kInt); };
    const auto parts_of = [](const at::Tensor& tensor, bool wanted) {
      return wanted ? tensor.chunk(3) : std::vector<at::Tensor>();
    };
    struct Kind {
      const char* name;
      std::function<Work(int call, at::Tensor& mine)>
          begin;  // sets `mine` to the tensor that receives the result
      std::function<at::Tensor(int call, bool is_root)> result;
    };
    const Kind kinds[] = {
        {"broadcast",
         [&](int call, at::Tensor& mine) {
           return group.broadcast(mine = number(call, rank), call % 3);
         },
         [&](int call, bool) { return number(call, call % 3); }},
        {"all_reduce",
         [&](int call, at::Tensor& mine) { return group.all_reduce(mine = number(call, rank)); },
         [&](int call, bool) { return numbers(call).sum(0, true, at::kInt); }},
        {"reduce",
         [&](int call, at::Tensor& mine) {
           return group.reduce(mine = number(call, rank), call % 3);
         },
         [&](int call, bool is_root) {
           return is_root ? numbers(call).sum(0, true, at::kInt) : number(call, rank);
         }},
        {"all_gather",
         [&](int call, at::Tensor& mine) {
           mine = torch::zeros({3}, at::kInt);
           return group.all_gather(mine.chunk(3), number(call, rank));
         },
         [&](int call, bool) { return numbers(call); }},
        {"gather",
         [&](int call, at::Tensor& mine) {
           mine = torch::zeros({3}, at::kInt);
           return group.gather(parts_of(mine, rank == call % 3), number(call, rank), call % 3);
         },
         [&](int call, bool is_root) {
           return is_root ? numbers(call) : torch::zeros({3}, at::kInt);
         }},
        {"scatter",
         [&](int call, at::Tensor& mine) {
           mine = torch::zeros({1}, at::kInt);
           return group.scatter(mine, parts_of(numbers(call), rank == call % 3), call % 3);
         },
         [&](int call, bool) { return number(call, rank); }},
    };
    for (const Kind& kind : kinds) {
      std::vector<at::Tensor> results(kCalls);
      std::vector<Work> works;
      for (int call = 0; call < kCalls; ++call) {
        works.push_back(kind.begin(call, results[static_cast<std::size_t>(call)]));
      }
      for (Work& work : works) work.wait();
      for (int call = 0; call < kCalls; ++call) {
        EXPECT_TRUE(
            same(results[static_cast<std::size_t>(call)], kind.result(call, rank == call % 3)))
            << kind.name << " " << call;
      }
    }
  });
}

// Number of the group's newest collective, as errors and dumps show it. (Earlier groups of this
// process had their own numbers.)
std::uint64_t last_number(const ProcessGroup& group) {
  const auto is_ours = [&](const trace::Member& member) {
    return member.party()->kind == "group" && member.party()->rank == group.rank() &&
           member.party()->ranks == group.ranks();
  };
  const auto members = trace::members();
  const auto ours = std::find_if(members.begin(), members.end(), is_ours);
  if (ours == members.end()) return 0;
  std::uint64_t last = 0;
  for (const trace::Record& record : trace::flight_recorder().read()) {
    if (record.kind != trace::Kind::Collective || record.member.party() != ours->party()) continue;
    if (record.member.generation() == ours->generation()) last = std::max(last, record.sequence);
  }
  return last;
}

TEST_P(Collectives, AreNumberedFromOneInEachGroup) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto tensor = torch::ones({2});
    const auto both = [&](ProcessGroup& in) {
      for (std::uint64_t number = 1; number <= 3; ++number) {
        EXPECT_EQ(last_number(in), number - 1);
        in.all_reduce(tensor).wait();
        EXPECT_EQ(last_number(in), number);
      }
    };
    both(group);
    auto pair = group.new_group({0, 2});
    if (pair) both(pair);
    EXPECT_EQ(last_number(group), 3U) << "other groups' collectives do not count here";
    // A rank that skips a collective is one number behind.
    auto other = group.new_group({2, 1});
    if (group.rank() == 2) static_cast<void>(other.broadcast(tensor, 0));
    group.barrier().wait();
    if (other) {
      EXPECT_EQ(last_number(other), group.rank() == 2 ? 1U : 0U);
    }
    if (group.rank() == 1) other.broadcast(tensor, 0).wait();
    group.barrier().wait();
    if (other) {
      EXPECT_EQ(last_number(other), 1U);
    }
  });
}

TEST_P(Collectives, TensorMayBeDroppedAtOnce) {
  on_ranks(2, [](ProcessGroup& group) {
    std::vector<Work> works;
    for (int call = 0; call < 50; ++call) works.push_back(group.all_reduce(torch::ones({100'000})));
    for (Work& work : works) work.wait();
  });
}

TEST_P(Collectives, BarrierWaitsForEarlierCollectives) {
  on_ranks(3, [](ProcessGroup& group) {
    std::vector<at::Tensor> tensors;
    for (int call = 0; call < 16; ++call) {
      tensors.push_back(torch::ones({1000}));
      static_cast<void>(group.all_reduce(tensors.back()));  // its Work is dropped
    }
    group.barrier().wait();
    for (const auto& tensor : tensors) EXPECT_TRUE(same(tensor, torch::full({1000}, 3.0)));
  });
}

TEST_P(Collectives, GroupOfOneRankNeedsNoOther) {
  on_ranks(1, [](ProcessGroup& group) {
    const auto tensor = torch::full({2}, 5.0);
    group.all_reduce(tensor, ReduceOp::Avg).wait();
    group.broadcast(tensor, 0).wait();
    group.reduce(tensor, 0, ReduceOp::Max).wait();
    const auto output = torch::zeros({2});
    group.all_gather({output}, tensor).wait();
    EXPECT_TRUE(same(output, torch::full({2}, 5.0)));
    const auto scattered = torch::zeros({2});
    group.scatter(scattered, {output}, 0).wait();
    group.all_to_all({output}, {scattered}).wait();
    group.reduce_scatter_into(scattered, output).wait();
    EXPECT_TRUE(same(scattered, torch::full({2}, 5.0)));
    group.barrier().wait();
    group.monitored_barrier(std::chrono::seconds(1));
  });
}

// The record of one collective of a rank.
struct Seen {
  std::uint64_t bytes = 0;
  std::vector<std::int64_t> shape;
  int root = -1;
  std::string reduction;
  bool operator==(const Seen&) const = default;
};

void PrintTo(const Seen& seen, std::ostream* out) {
  *out << seen.bytes << " bytes, shape " << testing::PrintToString(seen.shape) << ", root "
       << seen.root << ", " << seen.reduction;
}

std::map<std::string, Seen> seen_by(int rank) {
  std::map<std::string, Seen> all;
  for (const trace::Record& record : trace::flight_recorder().read()) {
    if (record.kind != trace::Kind::Collective || record.member.party()->rank != rank) continue;
    all[record.name] = {record.bytes,
                        {record.shape.begin(), record.shape.begin() + record.dims},
                        record.peer,
                        record.reduction};
  }
  return all;
}

// Three ranks. Every part has 5 floats; in all_to_all, the part for rank r has r + 1.
TEST_P(Collectives, RecordsShowBytesAndArguments) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto part = [](std::int64_t elements = 5) { return torch::ones({elements}); };
    const auto parts = [&] { return std::vector<at::Tensor>{part(), part(), part()}; };
    const auto none = std::vector<at::Tensor>();
    const int rank = group.rank();
    group.broadcast(part(), 1).wait();
    group.reduce(part(), 2, ReduceOp::Max).wait();
    group.all_reduce(part()).wait();
    group.all_gather(parts(), part()).wait();
    group.all_gather_into(part(15).view({3, 5}), part()).wait();
    group.gather(rank == 0 ? parts() : none, part(), 0).wait();
    group.scatter(part(), rank == 0 ? parts() : none, 0).wait();
    group.reduce_scatter(part(), parts(), ReduceOp::Product).wait();
    group.reduce_scatter_into(part(), part(15), ReduceOp::Min).wait();
    group.all_to_all({part(rank + 1), part(rank + 1), part(rank + 1)}, {part(1), part(2), part(3)})
        .wait();
    auto seen = seen_by(rank);
    EXPECT_EQ(seen["broadcast"], (Seen{20, {5}, 1, ""}));
    EXPECT_EQ(seen["reduce"], (Seen{20, {5}, 2, "Max"}));
    EXPECT_EQ(seen["all_reduce"], (Seen{20, {5}, -1, "Sum"}));
    EXPECT_EQ(seen["all_gather"], (Seen{4 * 20, {5}, -1, ""}));
    EXPECT_EQ(seen["all_gather_into"], (Seen{4 * 20, {5}, -1, ""}));
    const std::uint64_t at_root = rank == 0 ? 4 * 20 : 20;
    EXPECT_EQ(seen["gather"], (Seen{at_root, {5}, 0, ""}));
    EXPECT_EQ(seen["scatter"], (Seen{at_root, {5}, 0, ""}));
    EXPECT_EQ(seen["reduce_scatter"], (Seen{4 * 20, {5}, -1, "Product"}));
    EXPECT_EQ(seen["reduce_scatter_into"], (Seen{4 * 20, {5}, -1, "Min"}));
    EXPECT_EQ(seen["all_to_all"].bytes, 4u * static_cast<std::uint64_t>(3 * (rank + 1) + 6));
  });
}

}  // namespace
}  // namespace weft
