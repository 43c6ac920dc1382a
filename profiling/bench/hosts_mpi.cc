// SPDX-License-Identifier: Apache-2.0
// The Open MPI peer of hosts_bench: hosts_mpi PATH CASE..., see hosts_rounds.h.
#include <mpi.h>

#include "hosts_rounds.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  weft::bench::HostsRounds rounds(argv[1], rank, size);
  for (int i = 2; i < argc; ++i) {
    const auto one = weft::bench::HostsCase::from(argv[i]);
    const int count = static_cast<int>(one.bytes / sizeof(float));
    std::vector<float> data(static_cast<std::size_t>(count));
    std::vector<float> result(
        one.operation == "all_gather" ? data.size() * static_cast<std::size_t>(size) : data.size());
    rounds.run(one, [&] {
      if (one.operation == "all_reduce") {
        MPI_Allreduce(MPI_IN_PLACE, data.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      } else if (one.operation == "broadcast") {
        MPI_Bcast(data.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD);
      } else if (one.operation == "all_to_all") {
        MPI_Alltoall(data.data(), count / size, MPI_FLOAT, result.data(), count / size, MPI_FLOAT,
                     MPI_COMM_WORLD);
      } else {
        MPI_Allgather(data.data(), count, MPI_FLOAT, result.data(), count, MPI_FLOAT,
                      MPI_COMM_WORLD);
      }
    });
  }
  MPI_Finalize();
}
