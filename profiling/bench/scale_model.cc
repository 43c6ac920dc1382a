// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <weft/profiling/bench/scale_model.h>

namespace weft::bench {

namespace {

constexpr double kLarge = static_cast<double>(kLargeBytes);
constexpr double kEntry = 100;  // bytes of a rank's address, in a table or a value

double rounds(double participants) { return std::ceil(std::log2(std::max(participants, 1.0))); }

}  // namespace

int levels_of_tree(double ranks) {
  constexpr double kChildren = 8;
  int levels = 0;
  for (double reached = 1, last = 1; reached < ranks; reached += last *= kChildren) ++levels;
  return levels;
}

Modelled weft_at(double ranks, const Costs& costs, const Network& network) {
  constexpr double kRequests = 6, kChildren = 8;
  const double hosts = std::max(1.0, ranks / network.ranks_per_host);
  const double message = network.latency + costs.tcp_message;
  const double tree = 2 * levels_of_tree(ranks) * (network.latency + kChildren * costs.tcp_message);
  Modelled times;
  times.join = costs.joining + kRequests * ranks * costs.store_request +
               kEntry * ranks * ranks / network.bandwidth + tree + 2 * rounds(hosts) * message;
  times.tell_death = network.latency + tree;
  times.all_reduce_small =
      2 * rounds(network.ranks_per_host) * costs.shm_message + rounds(hosts) * message;
  times.all_reduce_large = costs.all_reduce_host +
                           2 * kLarge / network.bandwidth * (hosts - 1) / hosts +
                           2 * rounds(hosts) * message;
  return times;
}

Modelled gloo_at(double ranks, const Costs& costs, const Network& network) {
  constexpr double kNumber = 8;  // bytes for each pair
  const double message = network.latency + costs.tcp_message;
  Modelled times;
  times.join = ranks * (ranks + 1) * costs.store_request +
               ranks * ranks * (kEntry + kNumber * ranks) / network.bandwidth +
               (ranks - 1) * costs.connection;
  times.tell_death = message;
  times.all_reduce_small = 2 * (ranks - 1) * message;
  times.all_reduce_large =
      times.all_reduce_small + 2 * kLarge / network.bandwidth * (ranks - 1) / ranks;
  return times;
}

Modelled nccl_bootstrap_at(double ranks, const Costs& costs, const Network& network) {
  constexpr double kThreshold = 256, kRate = 7000, kBytes = 128;
  Modelled times;
  times.join = (ranks > kThreshold ? ranks / kRate : 0) + 2 * ranks * costs.connection +
               3 * std::floor(ranks / 2) * (network.latency + costs.tcp_message) +
               kBytes * ranks / network.bandwidth;
  return times;
}

}  // namespace weft::bench
