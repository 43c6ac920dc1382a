// SPDX-License-Identifier: Apache-2.0
// The formulas of scale_bench: what joining, telling a death and an all_reduce would take with more
// ranks than one machine can run. They add up measured costs of one machine and stated figures of a
// network, and leave out noise, ranks that start late and links that others use.
//
// n ranks, r on each host, h = n/r hosts; L seconds one way, W bytes a second of a host's link; t a
// TCP message and s one through shared memory, q a request to the store, c a connection (one end),
// j the joining of a rank by itself; d = ceil(log8 n) levels of the tree; B bytes of all_reduce,
// and a their all_reduce within a host.
//
// Weft (engine/membership/tree.h, transport/mesh/meeting.h, transport/mesh/algorithms.h):
//   join        j + 6 n q + 100 n^2/W + 2 d (L + 8 t) + 2 ceil(log2 h) (L + t)
//               six requests a rank; each reads a table of 100 bytes a rank; tree and barrier
//   tell death  L + 2 d (L + 8 t): to the root and down again, eight messages a level
//   all_reduce  4 B:    2 ceil(log2 r) s + ceil(log2 h) (L + t), by recursive doubling
//               64 MiB: a + 2 B/W (h-1)/h + 2 ceil(log2 h) (L + t), by recursive halving
// Gloo (gloo/transport/tcp/context.cc: createAndConnectAllPairs; gloo/allreduce.cc: its default
// ring), by default, that is without GLOO_ENABLE_STORE_V2_API (reads of 128 keys at once) and
// GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER (values without 8 bytes a pair; gloo/common/utils.cc):
//   join        n (n + 1) q + n^2 (100 + 8 n)/W + (n - 1) c
//               a rank sets one value and reads all n, of a number for each pair; full mesh
//   tell death  L + t: every rank has a connection to every other
//   all_reduce  2 (n - 1) (L + t) + 2 B/W (n-1)/n
// NCCL's bootstrap over sockets (src/bootstrap.cc: bootstrapInit, bootstrapRoot, ringAllInfo,
// socketRingAllGather, with its default NCCL_UID_STAGGER_THRESHOLD and _RATE):
//   join        n/7000 (if n > 256) + 2 n c + 3 floor(n/2) (L + t) + 128 n/W
//               ranks come to the root one by one, it connects back to each; then a ring both ways,
//               three messages a step (two sizes and the data), of 128 bytes a rank
#pragma once

#include <cstddef>

namespace weft::bench {

struct Network {
  double latency = 10e-6;     // seconds one way
  double bandwidth = 12.5e9;  // bytes a second of a host: 100 Gbit/s
  double ranks_per_host = 8;
};

// Measured on one machine, in seconds.
struct Costs {
  double tcp_message = 0;
  double shm_message = 0;
  double store_request = 0;
  double connection = 0;
  double joining = 0;          // processor time of a rank
  double all_reduce_host = 0;  // of kLargeBytes through shared memory
};

constexpr std::size_t kLargeBytes = 64 << 20;

struct Modelled {
  double join = 0, tell_death = 0, all_reduce_small = 0, all_reduce_large = 0;
};

Modelled weft_at(double ranks, const Costs& costs, const Network& network);
Modelled gloo_at(double ranks, const Costs& costs, const Network& network);
// Only `join`: the bootstrap does nothing else.
Modelled nccl_bootstrap_at(double ranks, const Costs& costs, const Network& network);

// Levels below the root of the tree of memberships.
int levels_of_tree(double ranks);

}  // namespace weft::bench
