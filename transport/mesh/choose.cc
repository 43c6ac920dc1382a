// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include <weft/transport/mesh/choose.h>

namespace weft::transport::mesh {

namespace {

// Up to this many bytes, sent by one rank to all others together, Direct is faster than Blocks,
// because a second hop costs more.
constexpr std::size_t kDirectBytes = 32 << 10;
// From this many ranks on, taking turns is faster than all ranks sending to all at once.
constexpr int kManyRanks = 8;
// Up to these sizes an all_reduce in pairs is fastest: first by doubling, then by halving. Over
// connections other than shared memory, where a ring cannot profit from the cache, halving stays
// fastest up to kHalvingApartBytes for powers of two, as no rank waits for another's turn.
constexpr std::size_t kDoublingBytes = 64 << 10, kHalvingBytes = 2 << 20,
                      kHalvingApartBytes = 64 << 20;
constexpr std::size_t kLargestChunk = 256 << 10, kSmallestChunk = 16 << 10;
// From kLentBytes on, a rank's part of an all_gather over shared memory goes in chunks that are
// long enough to be lent: the receiver copies them out of the sender's memory
// (transport/shm/loan.h).
constexpr std::size_t kLentBytes = 4 << 20, kLentChunk = 2 << 20;
// Chunks in a block: filling the pipeline costs one chunk, an eighth of the block.
constexpr std::size_t kChunksWanted = 8;
// In two levels. Not measured; the reasons are those of the sizes above, with hosts in place of
// ranks. Up to kDoublingBytes, sent by one leader to all others together, or in pairs where there
// are many hosts, trips over the network cost more than its bytes, and leaders need the fewest
// trips and messages. Above, all ranks of a host share its bytes in slices.
//
// Up to so many bytes from host to host, an all_to_all of equal parts goes in one message in place
// of one for each pair of ranks. A TCP connection that has been quiet sends about 14 KiB before it
// waits for an acknowledgement. When this limit was 32 KiB, an all_to_all of that size took
// 1.28 ms, and 0.75 directly (xeon-2-cores-2026-12-01-c75b144a-hosts.json in profiling/results).
constexpr std::size_t kGatheredBytes = 8 << 10;

std::size_t chunk_of(std::size_t block_bytes) {
  const std::size_t wanted = (block_bytes / kChunksWanted + 4095) / 4096 * 4096;
  return std::clamp(wanted, kSmallestChunk, kLargestChunk);
}

// Measured: `./dev bench collectives --case algorithms` prints each algorithm over sizes and ranks.
Choice choose_all_reduce(std::size_t bytes, bool is_small, int ranks, const Arithmetic& arithmetic,
                         std::size_t chunk, bool in_cache) {
  const bool many = ranks >= kManyRanks;
  if (is_small && (!many || arithmetic.wide)) return {Algorithm::Direct};
  // The algorithms below send partial sums, which would be twice as long in fp32.
  const bool in_pairs = many || ranks == 4;
  if (arithmetic.wide || !in_pairs) return {Algorithm::Blocks, chunk};
  if (bytes <= kDoublingBytes) return {Algorithm::Doubling};
  const bool is_power = std::has_single_bit(static_cast<unsigned>(ranks));
  if (bytes <= (is_power && !in_cache ? kHalvingApartBytes : kHalvingBytes))
    return {Algorithm::Halving};
  return {Algorithm::Ring, chunk};
}

Choice choose_where(const Call& call, const Arithmetic& arithmetic, int ranks, bool in_cache) {
  const auto bytes = static_cast<std::size_t>(call.bytes);
  const auto all = static_cast<std::size_t>(ranks);
  const bool is_small = bytes <= kDirectBytes / std::max<std::size_t>(1, all - 1);
  const std::size_t chunk = chunk_of(bytes / all);
  const bool many = ranks >= kManyRanks;
  switch (call.kind) {
    case Kind::AllReduce:
      return choose_all_reduce(bytes, is_small, ranks, arithmetic, chunk, in_cache);
    case Kind::Broadcast:
      if (many && is_small) return {Algorithm::Tree};
      if (is_small || ranks == 2) return {Algorithm::Direct};
      return {Algorithm::Blocks, chunk};
    case Kind::Reduce:
      return is_small || ranks == 2 ? Choice{Algorithm::Direct, chunk_of(bytes)}
                                    : Choice{Algorithm::Blocks, chunk};
    case Kind::ReduceScatter: return {Algorithm::Blocks, chunk};
    case Kind::AllGather:
      return many && !is_small ? Choice{Algorithm::Ring}
                               : Choice{Algorithm::Direct, std::max<std::size_t>(1, bytes)};
    case Kind::Gather:
    case Kind::Scatter:
    case Kind::AllToAll:
    case Kind::Barrier: return {Algorithm::Direct};
  }
  return {};
}

// Partial sums in fp32 go to all other leaders (leaders.cc).
bool is_for_leaders(std::size_t bytes, int hosts, bool is_wide) {
  const bool in_pairs = hosts >= kManyHosts && !is_wide;
  return bytes <= kDoublingBytes / (in_pairs ? 1 : static_cast<std::size_t>(hosts - 1));
}

}  // namespace

Choice choose_in_levels(const Call& call, const Arithmetic& arithmetic, const Layout& layout,
                        int ranks, const Chooser& chooser) {
  if (!layout.has_levels()) return chooser(call, arithmetic, ranks);
  const auto bytes = static_cast<std::size_t>(call.bytes);
  const auto slices = static_cast<std::size_t>(layout.slices());
  switch (call.kind) {
    case Kind::AllReduce:
    case Kind::Broadcast:
    case Kind::Reduce:
      if (is_for_leaders(bytes, layout.hosts(), reduces(call.kind) && arithmetic.wide))
        return {Algorithm::Leaders};
      return {Algorithm::Slices, slices * chunk_of(bytes / slices)};
    case Kind::AllGather: return {Algorithm::Slices, chunk_of(bytes)};
    case Kind::ReduceScatter:
      return {Algorithm::Slices, chunk_of(bytes / static_cast<std::size_t>(ranks))};
    case Kind::Barrier: return {Algorithm::Leaders};
    case Kind::AllToAll:
      return bytes > 0 ? Choice{Algorithm::Leaders} : chooser(call, arithmetic, ranks);
    case Kind::Gather:
    case Kind::Scatter: return chooser(call, arithmetic, ranks);
  }
  return {};
}

bool gathers_parts(const Layout& layout, std::size_t part_bytes) {
  const auto most = static_cast<std::size_t>(layout.slices());  // ranks on the largest host
  return layout.has_levels() && part_bytes > 0 && part_bytes <= kGatheredBytes / (most * most);
}

Choice choose(const Call& call, const Arithmetic& arithmetic, int ranks) {
  return choose_where(call, arithmetic, ranks, /*in_cache=*/false);
}

Choice choose_in_cache(const Call& call, const Arithmetic& arithmetic, int ranks) {
  Choice choice = choose_where(call, arithmetic, ranks, /*in_cache=*/true);
  if (call.kind == Kind::AllGather && choice.algorithm == Algorithm::Direct) {
    const auto bytes = static_cast<std::size_t>(call.bytes);
    choice.chunk_bytes = bytes < kLentBytes ? chunk_of(bytes) : kLentChunk;
  }
  return choice;
}

}  // namespace weft::transport::mesh
