// SPDX-License-Identifier: Apache-2.0
// The Open MPI peer of scale_bench. Prints two numbers: the seconds that the slowest rank took for
// MPI_Init, and from its begin to the end of the first MPI_Allreduce.
#include <chrono>
#include <cstdio>

#include <mpi.h>

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) {
  const double begin = now();
  MPI_Init(&argc, &argv);
  double times[2] = {now() - begin, 0};
  float value = 1;
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  times[1] = now() - begin;
  double slowest[2] = {0, 0};
  MPI_Reduce(times, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::printf("%.9f %.9f\n", slowest[0], slowest[1]);
  MPI_Finalize();
  return 0;
}
