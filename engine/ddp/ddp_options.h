// SPDX-License-Identifier: Apache-2.0
// Options and statistics of DistributedDataParallel.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace weft {

// Options of DistributedDataParallel, the same on all ranks except gradient_as_bucket_view.
struct DdpOptions {
  // A bucket is sent when its gradients have reached this many bytes. The first one is smaller so
  // that sending starts early.
  std::size_t bucket_bytes = 25 << 20, first_bucket_bytes = 1 << 20;
  // After each forward, find the parameters that the outputs do not depend on, and count their
  // gradients as zero.
  bool find_unused_parameters = false;
  // Gradients are views of the buckets, which saves one copy. A user who keeps a gradient over an
  // iteration sees it change.
  bool gradient_as_bucket_view = true;
  // The graph is the same in every iteration. Allows parameters that are used several times in one
  // backward.
  bool static_graph = false;
  // Copy rank 0's buffers (running means, …) to all ranks before each training forward.
  bool broadcast_buffers = true;
};

// Statistics of DistributedDataParallel on one rank.
struct DdpStats {
  std::size_t passes = 0;                 // synchronised backward passes
  std::vector<std::size_t> bucket_bytes;  // of the buckets in use, in launch order
  bool rebuilt = false;                   // buckets follow the observed order of gradients
  std::chrono::nanoseconds wait{0};  // host time spent waiting for the other ranks (CPU tensors)
  std::chrono::nanoseconds last_wait{0};  // of the last pass
};

}  // namespace weft
