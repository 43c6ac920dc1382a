// The algorithms of the collectives: each writes what one rank does into a plan.
#pragma once

#include <span>

#include <weft/transport/mesh/choose.h>
#include <weft/transport/mesh/plan.h>

namespace weft::transport::mesh {

// One rank's part in a collective, on host memory.
struct Job {
  Call call;
  int rank = 0;
  int ranks = 1;
  Slice data;  // what is not in many parts; the output of scatter and reduce_scatter
  std::span<const Slice> inputs;  // by rank, where there are many
  std::span<const Slice> outputs;
};

// The algorithm must be one that the kind has.
void write(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch);

}  // namespace weft::transport::mesh
