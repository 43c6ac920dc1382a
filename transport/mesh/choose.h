// Which algorithm carries a collective out. Only what all ranks know alike goes into it, so all
// choose alike.
#pragma once

#include <cstddef>
#include <functional>

#include <weft/transport/mesh/fold.h>
#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

enum class Algorithm {
  Direct,    // every rank sends what it has to whoever needs it, in one message
  Blocks,    // every rank owns one block of the memory: reduces or forwards it for all the others,
             // chunk by chunk
  Ring,      // each rank talks to its neighbours only, chunk by chunk
  Tree,      // a binomial tree
  Doubling,  // each rank exchanges all that it has with the one 1, 2, 4, … away, and reduces
  Halving,   // as that, but halves, quarters, … of the memory; then the same way back with the
             // results
};

struct Choice {
  Algorithm algorithm = Algorithm::Direct;
  std::size_t chunk_bytes = 0;  // of one message, where a part goes in several
};

Choice choose(const Call& call, const Arithmetic& arithmetic, int ranks);
// For lanes whose bytes the processors carry through memory that both sides share: what goes one
// way and what comes the other way take turns while both are in the cache.
Choice choose_in_cache(const Call& call, const Arithmetic& arithmetic, int ranks);
// As choose(): the same for all ranks.
using Chooser = std::function<Choice(const Call&, const Arithmetic&, int ranks)>;

// Chunks that are under way from one rank to another at a time: enough to keep both busy, few
// enough to stay in cache.
constexpr std::uint32_t kWindow = 4;

}  // namespace weft::transport::mesh
