#include <algorithm>

#include <weft/transport/mesh/choose.h>

namespace weft::transport::mesh {

namespace {

// What one rank may send in small messages before cutting the memory into blocks pays for its second hop.
constexpr std::size_t kDirectBytes = 32 << 10;
// From so many ranks on, all talking to all at once is worse than taking turns.
constexpr int kManyRanks = 8;
// An all_reduce in pairs is as short as these up to so many bytes, for powers of two from four ranks on and for many.
constexpr std::size_t kDoublingBytes = 256 << 10, kHalvingBytes = 2 << 20;
constexpr std::size_t kLargestChunk = 256 << 10, kSmallestChunk = 16 << 10;
constexpr std::size_t kChunksWanted = 8;  // in a block: what the first one costs is an eighth of the whole

std::size_t chunk_of(std::size_t block_bytes) {
  const std::size_t wanted = (block_bytes / kChunksWanted + 4095) / 4096 * 4096;
  return std::clamp(wanted, kSmallestChunk, kLargestChunk);
}

// Measured: `./dev bench collectives --case algorithms` prints each algorithm over sizes and ranks.
Choice choose_all_reduce(std::size_t bytes, bool is_small, int ranks, const Arithmetic& arithmetic, std::size_t chunk) {
  const bool many = ranks >= kManyRanks;
  if (is_small && (!many || arithmetic.wide)) return {Algorithm::Direct};
  // Those that follow pass sums on; in fp32 they would be twice as long.
  const bool in_pairs = many || ranks == 4;
  if (arithmetic.wide || !in_pairs) return {Algorithm::Blocks, chunk};
  if (bytes <= kDoublingBytes) return {Algorithm::Doubling};
  if (bytes <= kHalvingBytes) return {Algorithm::Halving};
  return {Algorithm::Ring, chunk};
}

}  // namespace

Choice choose(const Call& call, const Arithmetic& arithmetic, int ranks) {
  const auto bytes = static_cast<std::size_t>(call.bytes);
  const auto all = static_cast<std::size_t>(ranks);
  const bool is_small = bytes <= kDirectBytes / std::max<std::size_t>(1, all - 1);
  const std::size_t chunk = chunk_of(bytes / all);
  const bool many = ranks >= kManyRanks;
  switch (call.kind) {
    case Kind::AllReduce: return choose_all_reduce(bytes, is_small, ranks, arithmetic, chunk);
    case Kind::Broadcast:
      if (many && is_small) return {Algorithm::Tree};
      if (is_small || ranks == 2) return {Algorithm::Direct};
      return {Algorithm::Blocks, chunk};
    case Kind::Reduce:
      return is_small || ranks == 2 ? Choice{Algorithm::Direct, chunk_of(bytes)} : Choice{Algorithm::Blocks, chunk};
    case Kind::ReduceScatter: return {Algorithm::Blocks, chunk};
    case Kind::AllGather:
      return many && !is_small ? Choice{Algorithm::Ring} : Choice{Algorithm::Direct, std::max<std::size_t>(1, bytes)};
    case Kind::Gather:
    case Kind::Scatter:
    case Kind::AllToAll:
    case Kind::Barrier: return {Algorithm::Direct};
  }
  return {};
}

Choice choose_in_cache(const Call& call, const Arithmetic& arithmetic, int ranks) {
  Choice choice = choose(call, arithmetic, ranks);
  if (call.kind == Kind::AllGather && choice.algorithm == Algorithm::Direct) {
    choice.chunk_bytes = chunk_of(static_cast<std::size_t>(call.bytes));
  }
  return choice;
}

}  // namespace weft::transport::mesh
