// SPDX-License-Identifier: Apache-2.0
// The Open MPI peer of transport_bench.
#include <cstring>

#include <mpi.h>

#include "transport_rounds.h"

namespace {

enum Wish : unsigned long { kStream, kEcho, kAnswerEach };

struct Order {
  unsigned long bytes, count, wish;
};

void serve() {
  std::vector<char> memory(256 << 20, 1);
  for (Order order{};;) {
    MPI_Recv(&order, sizeof order, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (order.count == 0) return;
    const int bytes = static_cast<int>(order.bytes);
    if (order.wish != kStream) {
      for (unsigned long i = 0; i < order.count; ++i) {
        MPI_Recv(memory.data(), bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(memory.data(), order.wish == kEcho ? bytes : 0, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
      }
      continue;
    }
    const unsigned long window = weft::bench::window_of(order.bytes);
    std::vector<MPI_Request> requests;
    for (unsigned long i = 0; i < order.count; ++i) {
      requests.emplace_back();
      MPI_Irecv(memory.data(), bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &requests.back());
      if (requests.size() < window && i + 1 < order.count) continue;
      MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
      requests.clear();
    }
    MPI_Send(memory.data(), 1, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
  }
}

void say(std::size_t bytes, int count, Wish wish) {
  const Order order{bytes, static_cast<unsigned long>(count), wish};
  MPI_Send(&order, sizeof order, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
}

}  // namespace

int main(int argc, char** argv) {
  using weft::bench::seconds;
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  weft::bench::pin_to_core_of(rank);
  if (rank == 1) {
    serve();
    MPI_Finalize();
    return 0;
  }
  std::vector<char> memory(256 << 20, 1);
  const weft::bench::Participant mpi{
      [&](std::size_t bytes, int count) {
        std::vector<double> times;
        say(bytes, count, kEcho);
        for (int i = 0; i < count; ++i) {
          const double begin = seconds();
          MPI_Send(memory.data(), static_cast<int>(bytes), MPI_BYTE, 1, 1, MPI_COMM_WORLD);
          MPI_Recv(memory.data(), static_cast<int>(bytes), MPI_BYTE, 1, 1, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
          times.push_back(seconds() - begin);
        }
        return times;
      },
      [&](std::size_t bytes, int count) {
        say(bytes, count, kStream);
        const double begin = seconds();
        std::vector<MPI_Request> requests;
        for (int i = 0; i < count; ++i) {
          requests.emplace_back();
          MPI_Isend(memory.data(), static_cast<int>(bytes), MPI_BYTE, 1, 1, MPI_COMM_WORLD,
                    &requests.back());
          if (requests.size() < weft::bench::window_of(bytes)) continue;
          MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
          requests.clear();
        }
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
        MPI_Recv(memory.data(), 1, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        return seconds() - begin;
      },
      [&](std::size_t bytes, int count) {
        std::vector<double> times;
        say(bytes, count, kAnswerEach);
        for (int i = 0; i < count; ++i) {
          weft::bench::renew(memory.data(), bytes);
          const double begin = seconds();
          MPI_Send(memory.data(), static_cast<int>(bytes), MPI_BYTE, 1, 1, MPI_COMM_WORLD);
          MPI_Recv(memory.data(), 0, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
          times.push_back(seconds() - begin);
        }
        return times;
      }};
  weft::bench::measure_case(mpi, argc > 1 ? argv[1] : "polled");
  say(0, 0, kStream);
  MPI_Finalize();
}
