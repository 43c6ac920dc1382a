// SPDX-License-Identifier: Apache-2.0
// A communicator whose process has no memory left for what a collective needs besides its tensors.
// This is a program of its own: its aligned operator new, which allocates the scratch memory
// (transport/mesh/scratch.h), can be made to fail.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <new>

#include <weft/tests/transport/mesh/mesh_ranks.h>

namespace {
std::atomic<bool> is_exhausted{false};
std::atomic<int> refused{0};
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  if (is_exhausted && bytes >= 4096) {
    ++refused;
    throw std::bad_alloc();
  }
  const auto unit = static_cast<std::size_t>(alignment);
  if (void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace weft::transport::mesh {
namespace {

// The uses of scratch memory: the copy of a small all_reduce, sums in fp32, and a reduction whose
// result only the root receives.
enum class Needs { Copy, WideSum, PartOfReduce };

void PrintTo(Needs needs, std::ostream* out) {
  *out << (needs == Needs::Copy ? "copy" : needs == Needs::WideSum ? "wide sum" : "part of reduce");
}

class MeshWithoutMemory : public testing::TestWithParam<Needs> {};

TEST_P(MeshWithoutMemory, FailsEveryRankWithTheReason) {
  constexpr int kRanks = 3;
  refused = 0;
  std::barrier joined(kRanks);
  run_ranks(kRanks, [&](Communicator& communicator) {
    // The pin keeps it alive: connections may still read it when the operation has failed.
    const auto numbers = std::make_shared<std::vector<std::uint16_t>>(
        GetParam() == Needs::Copy ? 4000 : 1'000'000, 0);
    const Elements elements =
        elements_of(*numbers, GetParam() == Needs::WideSum ? Dtype::BFloat16 : Dtype::Int16);
    const auto call = [&] {
      return GetParam() == Needs::PartOfReduce
                 ? communicator.reduce(elements, 0, ReduceOp::Sum, numbers, Fence())
                 : communicator.all_reduce(elements, ReduceOp::Sum, numbers, Fence());
    };
    joined.arrive_and_wait();
    is_exhausted = true;
    const Op op = call();
    const Error error = expect_failed(op, "an operation without memory");
    EXPECT_THAT(error.blame(), testing::AnyOf(Blame::Busy, Blame::PeerLost)) << error.what();
    EXPECT_THAT(error.text(), testing::HasSubstr("is out of memory"));
    const Error next = expect_failed(communicator.barrier(Fence()), "the next operation");
    EXPECT_THAT(next.text(), testing::HasSubstr("is out of memory"));
  });
  EXPECT_GT(refused, 0);
  is_exhausted = false;
  run_ranks(kRanks, [](Communicator& communicator) {
    expect_done(communicator.barrier(Fence()), "a new communicator's");
  });
}

INSTANTIATE_TEST_SUITE_P(Of, MeshWithoutMemory,
                         testing::Values(Needs::Copy, Needs::WideSum, Needs::PartOfReduce));

}  // namespace
}  // namespace weft::transport::mesh
