// SPDX-License-Identifier: Apache-2.0
// The algorithms of the collectives. Each writes one rank's steps into a plan.
#pragma once

#include <span>

#include <weft/transport/mesh/choose.h>
#include <weft/transport/mesh/layout.h>
#include <weft/transport/mesh/plan.h>

namespace weft::transport::mesh {

// One rank's part in a collective, on host memory. In a stage of a plan, `rank`, `ranks` and the
// call's root count places among the stage's members.
struct Job {
  Call call;
  int rank = 0;
  int ranks = 1;
  // The rank's single tensor; for scatter and reduce_scatter, its output.
  Slice data;
  std::span<const Slice> inputs;  // one for each rank, for collectives that have many
  std::span<const Slice> outputs;
  const Layout* layout = nullptr;  // for the algorithms in two levels
  // In a stage: an average is divided by so many ranks; 0: by all of them.
  int averaged = 0;
  // In a stage: where a Direct reduce puts its result; null: in `data`.
  std::byte* result = nullptr;
  // In a stage: Direct reductions and reduce_scatter may widen or narrow.
  Precision precision = Precision::Whole;
  // In a stage: a Direct all_reduce reads the numbers here, which stay as they are and are fp32 if
  // it narrows, and writes to `data`; null: it reads `data`.
  const std::byte* from = nullptr;
};

// Writes the plan. Requires that `choice` is an algorithm of the collective's kind.
void write(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch);
// Adds the steps of a job among the members of the plan's stage.
void append(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch);

}  // namespace weft::transport::mesh
