// SPDX-License-Identifier: Apache-2.0
#include <map>

#include <ATen/core/grad_mode.h>

#include <weft/base/error.h>
#include <weft/engine/codec/module_state.h>
#include <weft/engine/tensor/tensor.h>

namespace weft {

namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

template <class Dict>
Named detached(const Dict& tensors) {
  Named named;
  for (const auto& item : tensors) named.emplace_back(item.key(), item.value().detach());
  return named;
}

// Appends pairs of a tensor of the module and its new value.
void match(const char* kind, const Named& own, const Named& values,
           std::vector<std::pair<at::Tensor, at::Tensor>>& pairs) {
  std::map<std::string, at::Tensor> by_name(values.begin(), values.end());
  for (const auto& [name, tensor] : own) {
    const auto found = by_name.find(name);
    if (found == by_name.end())
      throw Error(Blame::Caller, "the state has no " + std::string(kind) + " '" + name + "'");
    if (found->second.defined() != tensor.defined() ||
        (tensor.defined() && found->second.sizes() != tensor.sizes())) {
      throw Error(Blame::Caller, std::string(kind) + " '" + name + "' is " +
                                     tensor::describe(tensor) + " in the module and " +
                                     tensor::describe(found->second) + " in the state");
    }
    if (tensor.defined()) pairs.emplace_back(tensor, found->second);
    by_name.erase(found);
  }
  if (by_name.empty()) return;
  throw Error(Blame::Caller, "the module has no " + std::string(kind) + " '" +
                                 by_name.begin()->first + "', which the state has");
}

}  // namespace

ModuleState state_of(const torch::nn::Module& module) {
  return {detached(module.named_parameters()), detached(module.named_buffers())};
}

void ModuleState::load_into(torch::nn::Module& module) const {
  const ModuleState own = state_of(module);
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  match("parameter", own.parameters, parameters, pairs);
  match("buffer", own.buffers, buffers, pairs);
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, value] : pairs) tensor.copy_(value);
}

}  // namespace weft
