// SPDX-License-Identifier: Apache-2.0
// The environment variables by which weft-run, torchrun, mpirun and srun tell a process its rank.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include <weft/engine/rendezvous/rendezvous.h>

namespace weft::group {

// mpirun (Open MPI, MPICH) and srun have names of their own for these numbers.
constexpr auto kRankVariables = {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                 "SLURM_PROCID"};
constexpr auto kWorldSizeVariables = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                      "SLURM_NTASKS"};
constexpr auto kLocalRankVariables = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                      "SLURM_LOCALID"};

// Returns the first of these variables that is set; null if none is.
const char* first_set(const Environment& environment, std::initializer_list<const char*> names);
// Returns the number in the first of them that is set. Throws Caller if it is no number.
std::optional<int> first_number(const Environment& environment,
                                std::initializer_list<const char*> names);

std::optional<int> rank_variable(const Environment& environment);

}  // namespace weft::group
