// SPDX-License-Identifier: Apache-2.0
// Models that are built without memory, and get their values later.
//
//   Net net{nullptr};
//   {
//     const weft::OnMeta on_meta;
//     net = Net();
//   }
//   weft::FullyShardedDataParallel sharded(net, group);  // each rank: its rows, without memory
//   weft::materialize(*net, /*seed=*/7);
//
// It works for models that are not sharded as well.
#pragma once

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>

#include <weft/base/export.h>

namespace torch::nn {
class Module;
}

namespace weft {

// While it lives, functions of this thread that make tensors (torch::empty, torch::randn, …) make
// them on the meta device, which has shapes and no memory, unless a call names a device or passes
// a tensor. torch::tensor({…}) and torch::from_blob stay on the CPU. A constructor that reads a
// value (item()) throws libtorch's error. Objects nest.
class [[nodiscard]] WEFT_API OnMeta {
 public:
  // Throws Unsupported if another library of the process has taken libtorch's dispatch key
  // DeferredInit, which it needs.
  OnMeta();
  ~OnMeta();
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;

 private:
  const bool before_;
};

// Gives values to the parameters and buffers that are on meta, in place: members, parameters() and
// optimizers see them. Of a sharded model each rank keeps its rows; it makes all rows of one layer
// at a time, and communicates with nobody. The values depend on `seed` and on the modules' names,
// so they are the same on any number of ranks, sharded or not. All ranks call it, with the same
// seed, for the whole model. Values that are there already stay; a parameter that modules share
// gets its values from the first of them that sets it.
//
// Layers of torch::nn and Weft's SyncBatchNorm set theirs by reset_parameters(). Then `init`, if
// given, is called with each module that has parameters or buffers of its own on meta, without
// gradients, parents before children. It may write to the module's own: members, or
// module.parameters() and module.buffers(), which do not list those of its children meanwhile. It
// must not wait for other ranks. libtorch's default generators are seeded for each module, and have
// their former states afterwards; no other thread may draw from them meanwhile.
//
// Throws Caller, naming the parameters and buffers that would stay without values: before anything
// is changed if there is no `init`, and otherwise at the end; a later call gives values to these.
// Tensors that are members and not registered stay on meta.
WEFT_API void materialize(torch::nn::Module& model, std::uint64_t seed,
                          std::function<void(torch::nn::Module&)> init = {},
                          c10::Device device = c10::Device(c10::kCPU));

}  // namespace weft
