// SPDX-License-Identifier: Apache-2.0
// A communication hook that sends matrices of low rank in place of gradients: PowerSGD (Vogels et
// al., 2019). Semantics and numbers of PyTorch's powerSGD_hook.
#pragma once

#include <cstdint>

#include <weft/base/export.h>
#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// Options of comm_hooks::power_sgd, the same on all ranks.
struct PowerSgdOptions {
  // The rank of the matrices that are sent in place of a gradient; 1 to 4 are usual.
  int matrix_approximation_rank = 1;
  // The first backward passes are averaged without compression; at least 2 if error feedback or
  // warm start is on, since the buckets change after the first pass. A tenth of all steps is usual.
  int start_power_sgd_iter = 1000;
  // A gradient of n rows and m columns is compressed if (n + m) · rank · min_compression_rate is
  // less than n · m.
  double min_compression_rate = 2;
  // Adds what compression has lost to the next gradient. Costs a copy of the gradients.
  bool use_error_feedback = true;
  // Begins with the matrices of the previous pass in place of random ones.
  bool warm_start = true;
  // Added to the norm of each column that is made orthogonal.
  double orthogonalization_epsilon = 0;
  // Of the random matrices.
  std::uint32_t random_seed = 0;
};

namespace comm_hooks {

// Seen as a matrix of its first dimension's rows, each gradient that is large enough is replaced by
// a product of two thin matrices, which are averaged over the ranks. Gradients of vectors, small,
// sparse and complex ones are averaged as they are. One hook is for one DistributedDataParallel.
// The first compressed pass makes a group of the same ranks, for each device, in which matrices
// travel independently of other collectives. If the layout of a bucket changes, since parameters
// were frozen or thawed, what was remembered for it is forgotten. Throws Caller for options outside
// of their ranges.
WEFT_API CommHook power_sgd(ProcessGroup group, PowerSgdOptions options = {});

}  // namespace comm_hooks
}  // namespace weft
