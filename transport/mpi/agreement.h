// Before the ranks of a group call something of MPI that has no deadline, and in which each would
// wait for ever for one that does not come: all of them do, or none.
//
// What remains is a rank that stops between the two, for which the others wait; one that dies there
// is mpirun's, which ends the job.
#pragma once

#include <weft/base/deadline.h>
#include <weft/transport/bootstrap.h>

namespace weft::transport::mpi {

// Blocks until all `ranks` have come. Throws Timeout where one of them did not within its own time,
// on all that do.
void agree_to_begin(Bootstrap& store, int rank, int ranks, Deadline deadline);

}  // namespace weft::transport::mpi
