// Averaging parameters instead of gradients: after every step, or now and then (local SGD, Stich,
// 2018). Semantics of torch.distributed.algorithms.model_averaging.
//
//   weft::PeriodicAverager averager(group, {.period = 4, .warmup_steps = 100});
//   {
//     const auto quiet = ddp.no_sync();                  // or no DistributedDataParallel at all
//     loss_of(net(inputs)).backward();
//   }
//   optimizer.step();
//   averager.average_parameters(net->parameters());      // sends something in every fourth step
//   only
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// Replaces every value by its average over the ranks; afterwards all ranks have the same bits.
// Every rank gives tensors of the same shapes and dtypes (floating point or complex) in the same
// order. They travel flat, in pieces, several at once, and are complete on return (CUDA: for the
// current stream). Collective. Throws Caller, before anything is sent, for a tensor that is
// undefined, sparse, expanded, or of integers. Does nothing in an empty group, as new_group() gives
// it to those who are not members.
WEFT_API void average_parameters(const std::vector<at::Tensor>& parameters, ProcessGroup group);

struct PeriodicAveragerOptions {
  int period = 1;        // steps from one averaging to the next
  int warmup_steps = 0;  // so many first steps do not count: gradients are averaged there, by
                         // DistributedDataParallel
};

class WEFT_API PeriodicAverager {
 public:
  // Throws Caller for a period below 1, or a negative warm-up.
  PeriodicAverager(ProcessGroup group, PeriodicAveragerOptions options);

  // Once after each step, on every rank. Averages in steps warmup_steps, warmup_steps + period, …
  // (counted from 0), and says whether this was one.
  bool average_parameters(const std::vector<at::Tensor>& parameters);
  // Steps so far.
  int steps() const { return steps_; }

 private:
  ProcessGroup group_;
  PeriodicAveragerOptions options_;
  int steps_ = 0;
};

}  // namespace weft
