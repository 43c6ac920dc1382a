// SPDX-License-Identifier: Apache-2.0
// Loads models that others have trained, as Hugging Face distributes them: safetensors files.
//
//   weft::checkpoint::load_safetensors("llama", group, *net, {.name_in_file = [](const auto& name)
//   {
//                                        return "model." + name;
//                                      }});
#pragma once

#include <functional>
#include <string>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace weft::checkpoint {

// Options of load_safetensors(), the same on all ranks.
struct SafetensorsOptions {
  // Returns the name in the files of the module's parameter or buffer `name`, or "" to leave its
  // value alone. Without a function the names are the same.
  std::function<std::string(const std::string& name)> name_in_file{};
  // If false, tensors of the files for which the module has no parameter or buffer are left out.
  bool use_all = true;
};

// Loads a module's parameters and buffers. `path` is a .safetensors file, or a folder of them, with
// or without a model.safetensors.index.json that says which file has which tensor. All ranks read
// it. The module may be sharded (FullyShardedDataParallel): each rank reads its own rows only.
// Values of another floating-point dtype are converted. Of the names of one tensor that modules
// share, the files need one.
//
// Collective; blocks. Throws one error on all ranks: Caller, which lists the names, for parameters
// and buffers that the files do not have, tensors that the module does not have, and other shapes
// or dtypes; nothing was loaded then. A file that cannot be read leaves the module with a part of
// the values. It needs memory for one tensor at a time.
WEFT_API void load_safetensors(const std::string& path, ProcessGroup group,
                               torch::nn::Module& module, const SafetensorsOptions& options = {});

}  // namespace weft::checkpoint
