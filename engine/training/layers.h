// SPDX-License-Identifier: Apache-2.0
// Lists the layers of torch::nn and of Weft for materialize() and checkpointed(). No other file
// does.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace weft::training {

// Modules whose own parameters and buffers get their values together: one module, except that a
// MultiheadAttention sets a bias of its out_proj.
struct Layer {
  std::string name;  // its path in the model; "" for the root
  std::vector<torch::nn::Module*> modules;
  bool is_in_transformer = false;  // below a torch::nn::Transformer, which sets what its layers set
};

// The layers of the model in the order of named_modules(), each once. The model owns the modules.
std::vector<Layer> layers_in(torch::nn::Module& model);

// Calls the layer's reset_parameters(), or what stands for it, if it is one of torch::nn's or
// Weft's. Leaves other modules alone.
void reset(const Layer& layer);

// While it lives, the members `weight` and `bias` of torch::nn's layers are the parameters that the
// layer has registered. Otherwise they may be another layer's, which the program has assigned to
// them in order to share it.
class RegisteredMembers {
 public:
  explicit RegisteredMembers(const Layer& layer);
  ~RegisteredMembers();
  RegisteredMembers(const RegisteredMembers&) = delete;
  RegisteredMembers& operator=(const RegisteredMembers&) = delete;

 private:
  std::vector<std::pair<at::Tensor*, at::Tensor>> assigned_;  // a member, and what it was
};

// True for layers that update running statistics in forward.
bool has_running_statistics(const torch::nn::Module& module);

}  // namespace weft::training
