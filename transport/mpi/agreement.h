// SPDX-License-Identifier: Apache-2.0
// Makes all ranks of a group call a blocking MPI function, or none. Such a function has no
// deadline: each rank would wait for ever for a rank that does not call it.
//
// One case remains: a rank that stops after it has agreed and before it calls MPI; the others wait
// for it. If it dies there, mpirun ends the job.
#pragma once

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::transport::mpi {

// Blocks until all `ranks` have called it. Throws Timeout on all ranks that call it if one rank's
// deadline passes before all have called it.
void agree_to_begin(Bootstrap& store, int rank, int ranks, Deadline deadline);

}  // namespace weft::transport::mpi
