// SPDX-License-Identifier: Apache-2.0
// Shared by the peers that rpc_bench builds: programs of two ranks; rank 0 calls and prints the
// seconds that each call took.
//
//   usage: PROGRAM SOCKET number|tensor BYTES CALLS SAMPLES AT_ONCE, with RANK in the environment
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "transport_rounds.h"

namespace weft::bench {

struct Order {
  std::string address;  // of a unix socket in the file system
  bool is_number = false;
  std::size_t bytes = 0;
  int calls = 0;
  int samples = 0;
  std::size_t at_once = 1;
};

inline Order order_of(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s SOCKET number|tensor BYTES CALLS SAMPLES AT_ONCE\n", argv[0]);
    std::exit(2);
  }
  return {std::string("unix:") + argv[1],
          argv[2] == std::string("number"),
          std::strtoul(argv[3], nullptr, 10),
          std::atoi(argv[4]),
          std::atoi(argv[5]),
          std::strtoul(argv[6], nullptr, 10)};
}

inline int own_rank() { return std::atoi(std::getenv("RANK")); }

// Prints the seconds of each call for each sample; `sample` makes the order's calls once.
inline void print_times(const Order& order, const std::function<void()>& sample) {
  for (int i = -2; i < order.samples; ++i) {
    const double start = seconds();
    sample();
    if (i >= 0) std::printf("%.9f ", (seconds() - start) / order.calls);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace weft::bench
