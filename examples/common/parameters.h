// SPDX-License-Identifier: Apache-2.0
// Returns references to the parameters of a module on another worker, for an optimizer that steps
// them there:
//
//   auto parameters = module.sync<&examples::parameters_of<NetImpl>>();   // module: RRef<NetImpl>
#pragma once

#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

namespace examples {

template <class Module>
std::vector<weft::RRef<torch::Tensor>> parameters_of(Module& module) {
  std::vector<weft::RRef<torch::Tensor>> references;
  for (const torch::Tensor& parameter : module.parameters()) references.emplace_back(parameter);
  return references;
}

}  // namespace examples
