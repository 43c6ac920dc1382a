// SPDX-License-Identifier: Apache-2.0
// Other DistributedDataParallel of one module in this process: a module may have two wrappers, and
// both are called for each of its gradients.
//
// A reducer owns one, which knows those of all other reducers of the process. Thread-safe; nothing
// here blocks.
#pragma once

#include <atomic>
#include <cstddef>

#include <weft/engine/ddp/trained_parameters.h>

namespace weft::parallel {

class OtherWrappers {
 public:
  // `parameters` must outlive it.
  explicit OtherWrappers(const TrainedParameters& parameters);
  ~OtherWrappers();
  OtherWrappers(const OtherWrappers&) = delete;
  OtherWrappers& operator=(const OtherWrappers&) = delete;

  // Called when this wrapper averages gradients of the backward that this thread runs.
  void note_averaged();
  // Called for each gradient that this wrapper averages. Throws Caller if another wrapper has
  // been called for the same gradient: each would average the other's average. `context_pass`
  // tells an AutogradContext's passes apart.
  void require_alone(std::size_t parameter, const void* context_pass) const;
  // True if another wrapper averages the parameter's gradients of that graph task of libtorch.
  bool average(std::size_t parameter, int graph_task) const;

 private:
  const TrainedParameters& parameters_;
  std::atomic<int> averaged_task_{-1};  // the graph task of the last averaged backward
};

}  // namespace weft::parallel
