// SPDX-License-Identifier: Apache-2.0
#include <unordered_set>

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>

#include <weft/engine/training/layers.h>
#include <weft/engine/training/sync_batch_norm.h>

namespace weft::training {

namespace {

namespace nn = torch::nn;

template <class... Layers>
bool is_one_of(const nn::Module& module) {
  return ((dynamic_cast<const Layers*>(&module) != nullptr) || ...);
}

template <class... Layers>
void reset_if_one_of(nn::Module& module) {
  const auto reset_as = [](auto* layer) {
    if (layer != nullptr) layer->reset_parameters();
  };
  (reset_as(dynamic_cast<Layers*>(&module)), ...);
}

// The layers that have parameters or buffers of their own and a public reset_parameters(). The
// containers of torch::nn, and its AdaptiveLogSoftmaxWithLoss and TransformerEncoderLayer, have
// none of their own.
void reset_module(nn::Module& module) {
  reset_if_one_of<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
                  nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                  nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::LayerNormImpl,
                  nn::GroupNormImpl, nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl, nn::RNNCellImpl,
                  nn::LSTMCellImpl, nn::GRUCellImpl>(module);
  reset_if_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                  nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl,
                  SyncBatchNorm1dImpl, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl>(module);
  if (auto* const attention = dynamic_cast<nn::MultiheadAttentionImpl*>(&module))
    attention->_reset_parameters();
  // Its reset() makes another tensor, so its value is set as it does.
  if (auto* const prelu = dynamic_cast<nn::PReLUImpl*>(&module))
    prelu->weight.fill_(prelu->options.init());
}

// Calls use(member, key) for the members that are one tensor each in all layers that have them.
template <class... Layers, class Use>
void for_members(nn::Module& module, const Use& use) {
  const auto visit = [&](auto* layer) {
    if (layer == nullptr) return;
    use(layer->weight, "weight");
    if constexpr (requires { layer->bias.defined(); }) use(layer->bias, "bias");
  };
  (visit(dynamic_cast<Layers*>(&module)), ...);
}

class LayerWalk {
 public:
  void visit(nn::Module& module, const std::string& path, bool is_in_transformer) {
    if (!seen_.insert(&module).second) return;
    is_in_transformer |= is_one_of<nn::TransformerImpl>(module);
    Layer layer{path, {&module}, is_in_transformer};
    if (auto* const attention = dynamic_cast<nn::MultiheadAttentionImpl*>(&module)) {
      nn::Module* const out = attention->out_proj.get();
      if (seen_.insert(out).second) layer.modules.insert(layer.modules.begin(), out);
    }
    layers.push_back(std::move(layer));
    for (const auto& child : module.named_children()) {
      visit(*child.value(), path.empty() ? child.key() : path + "." + child.key(),
            is_in_transformer);
    }
  }

  std::vector<Layer> layers;

 private:
  std::unordered_set<const nn::Module*> seen_;
};

}  // namespace

std::vector<Layer> layers_in(nn::Module& model) {
  LayerWalk walk;
  walk.visit(model, "", false);
  return std::move(walk.layers);
}

void reset(const Layer& layer) {
  for (nn::Module* const module : layer.modules) {
    reset_module(*module);
    if (!layer.is_in_transformer) continue;
    // As torch::nn::Transformer::reset_parameters() does, after those of its layers.
    for (at::Tensor& parameter : module->parameters(/*recurse=*/false)) {
      if (parameter.dim() > 1) nn::init::xavier_uniform_(parameter);
    }
  }
}

RegisteredMembers::RegisteredMembers(const Layer& layer) {
  for (nn::Module* const module : layer.modules) {
    const auto registered = module->named_parameters(/*recurse=*/false);
    const auto use = [&](at::Tensor& member, const std::string& key) {
      const at::Tensor* const own = registered.find(key);
      if (own != nullptr && !own->is_same(member))
        assigned_.emplace_back(&member, std::exchange(member, *own));
    };
    for_members<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
                nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::LayerNormImpl,
                nn::GroupNormImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                nn::PReLUImpl>(*module, use);
  }
}

RegisteredMembers::~RegisteredMembers() {
  for (auto& [member, before] : assigned_) *member = before;
}

bool has_running_statistics(const nn::Module& module) {
  return is_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                   nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl,
                   SyncBatchNorm1dImpl, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl>(module);
}

}  // namespace weft::training
