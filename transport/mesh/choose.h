// SPDX-License-Identifier: Apache-2.0
// Chooses the algorithm of a collective. The choice depends only on values that are equal on all
// ranks, so all ranks choose the same.
#pragma once

#include <cstddef>
#include <functional>

#include <weft/transport/mesh/fold.h>
#include <weft/transport/mesh/layout.h>
#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

enum class Algorithm {
  // Every rank sends its data in one message to each rank that needs it.
  Direct,
  // Every rank owns one block of the memory and reduces or forwards it for all others, chunk by
  // chunk.
  Blocks,
  // Each rank exchanges data only with its neighbours, chunk by chunk.
  Ring,
  // A binomial tree.
  Tree,
  // Each rank exchanges all its data with the rank 1, 2, 4, … away, and reduces.
  Doubling,
  // Like Doubling, but exchanges halves, quarters, … of the memory, and then the results on the
  // same way back.
  Halving,
  // In two levels (levels.h): the ranks of each host give one of them their data; these leaders
  // do the collective over the network, and give the ranks of their hosts the result. An all_to_all
  // of equal parts has one leader for each other host.
  Leaders,
  // In two levels: like Leaders, but each rank of a host leads for one slice of the memory, so that
  // all of them share the work, and chunk by chunk, so that the network carries one chunk while the
  // hosts reduce the next.
  Slices,
};

struct Choice {
  Algorithm algorithm = Algorithm::Direct;
  std::size_t chunk_bytes = 0;  // of one message, for algorithms that cut parts into chunks
};

Choice choose(const Call& call, const Arithmetic& arithmetic, int ranks);
// For connections through shared memory, where the processors copy all bytes: prefers chunks, so
// that sent and received data alternate while both are in the cache.
Choice choose_in_cache(const Call& call, const Arithmetic& arithmetic, int ranks);
// Like choose(): must return the same on all ranks.
using Chooser = std::function<Choice(const Call&, const Arithmetic&, int ranks)>;
// Returns an algorithm in two levels where the layout has them and it is faster; else what the
// chooser does.
Choice choose_in_levels(const Call& call, const Arithmetic& arithmetic, const Layout& layout,
                        int ranks, const Chooser& chooser);

// True if an all_to_all with parts of so many bytes each, on all ranks, gathers its messages
// between hosts: the parts are so small that a message costs more than its bytes.
bool gathers_parts(const Layout& layout, std::size_t part_bytes);

// Chunks in transit from one rank to another at a time: enough to keep both busy, few enough to
// stay in the cache.
constexpr std::uint32_t kWindow = 4;

// From so many hosts on, they take turns, in a ring, a tree or pairs, in place of all hosts sending
// to all. Not measured.
constexpr int kManyHosts = 9;

}  // namespace weft::transport::mesh
