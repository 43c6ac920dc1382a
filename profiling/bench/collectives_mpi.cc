// SPDX-License-Identifier: Apache-2.0
// The Open MPI peer of collectives_bench: the same calls, timing and output format.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include <mpi.h>

#include <sched.h>
#include <unistd.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % static_cast<unsigned>(sysconf(_SC_NPROCESSORS_ONLN)),
          &cores);
  sched_setaffinity(0, sizeof cores, &cores);
  const char* operation = argc > 1 ? argv[1] : "all_reduce";
  for (const std::size_t bytes :
       {std::size_t{4}, std::size_t{1} << 10, std::size_t{64} << 10, std::size_t{1} << 20,
        std::size_t{16} << 20, std::size_t{64} << 20}) {
    const int count = static_cast<int>(bytes / sizeof(float));
    std::vector<float> data(static_cast<std::size_t>(count), 0.0F);
    std::vector<float> gathered(std::strcmp(operation, "all_gather") == 0
                                    ? data.size() * static_cast<std::size_t>(size)
                                    : 1);
    const auto call = [&] {
      if (std::strcmp(operation, "all_reduce") == 0) {
        MPI_Allreduce(MPI_IN_PLACE, data.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      } else if (std::strcmp(operation, "broadcast") == 0) {
        MPI_Bcast(data.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD);
      } else {
        MPI_Allgather(data.data(), count, MPI_FLOAT, gathered.data(), count, MPI_FLOAT,
                      MPI_COMM_WORLD);
      }
    };
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < 3; ++i) call();
    const double start = MPI_Wtime();
    for (int i = 0; i < 5; ++i) call();
    int calls =
        std::clamp(static_cast<int>(0.3 / std::max((MPI_Wtime() - start) / 5, 1e-7)), 6, 20000);
    MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int i = 0; i < calls / 5; ++i) call();
    std::vector<double> times;
    for (int i = 0; i < calls; ++i) {
      const double begin = MPI_Wtime();
      call();
      times.push_back(MPI_Wtime() - begin);
    }
    if (rank == 0) {
      std::printf("%zu", bytes);
      for (const double time : times) std::printf(" %.9f", time);
      std::printf("\n");
    }
  }
  MPI_Finalize();
}
