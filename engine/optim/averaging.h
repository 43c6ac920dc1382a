// SPDX-License-Identifier: Apache-2.0
// Averages parameters instead of gradients: after every step, or in every nth step (local SGD,
// Stich, 2018). Semantics of torch.distributed.algorithms.model_averaging.
//
//   weft::PeriodicAverager averager(group, {.period = 4, .warmup_steps = 100});
//   {
//     const auto quiet = ddp.no_sync();  // or use no DistributedDataParallel at all
//     loss_of(net(inputs)).backward();
//   }
//   optimizer.step();
//   averager.average_parameters(net->parameters());  // sends only in every fourth step
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// Collective. Replaces every value by its average over the ranks; afterwards all ranks have the
// same bits. Every rank gives tensors of the same shapes and dtypes (floating point or complex) in
// the same order. They are sent in flat pieces, several at once, and the averages are complete on
// return (CUDA: for the current stream). Throws Caller, before anything is sent, for a tensor that
// is undefined, sparse, expanded, or of integers. Does nothing in an empty group, which new_group()
// returns to ranks that are not members.
WEFT_API void average_parameters(const std::vector<at::Tensor>& parameters, ProcessGroup group);

// Options of PeriodicAverager.
struct PeriodicAveragerOptions {
  int period = 1;  // steps from one averaging to the next
  // The first steps, in which DistributedDataParallel averages gradients and nothing is done here.
  int warmup_steps = 0;
};

// Averages parameters in every nth step.
class WEFT_API PeriodicAverager {
 public:
  // Throws Caller for a period below 1 or a negative warm-up.
  PeriodicAverager(ProcessGroup group, PeriodicAveragerOptions options);

  // Called once after each step, on every rank. Averages in the steps warmup_steps, warmup_steps +
  // period, … (counted from 0); returns true if this was one of them.
  bool average_parameters(const std::vector<at::Tensor>& parameters);
  // The number of steps so far.
  int steps() const { return steps_; }

 private:
  ProcessGroup group_;
  PeriodicAveragerOptions options_;
  int steps_ = 0;
};

}  // namespace weft
