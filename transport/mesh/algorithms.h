// SPDX-License-Identifier: Apache-2.0
// The algorithms of the collectives. Each writes one rank's steps into a plan.
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
  // The rank's single tensor; for scatter and reduce_scatter, its output.
  Slice data;
  std::span<const Slice> inputs;  // one for each rank, for collectives that have many
  std::span<const Slice> outputs;
};

// Writes the plan. Requires that `choice` is an algorithm of the collective's kind.
void write(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch);

}  // namespace weft::transport::mesh
