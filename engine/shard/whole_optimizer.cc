// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <sstream>
#include <utility>

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <weft/base/log.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/whole_optimizer.h>

namespace weft::shard {

namespace {

using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Shapes and strides like a whole parameter, with the memory of one element.
at::Tensor stand_in(const UnitParameter& parameter, const at::Tensor& shard) {
  at::Tensor tensor =
      at::empty_strided(parameter.sizes, std::vector<std::int64_t>(parameter.sizes.size(), 0),
                        shard.options().requires_grad(false));
  return tensor.set_requires_grad(shard.requires_grad());
}

// A copy of the state with other tensors. Only a state's class knows its members, so this writes
// the state to an archive and reads it back.
std::unique_ptr<OptimizerParamState> converted(
    const OptimizerParamState& state, const std::function<at::Tensor(const at::Tensor&)>& convert,
    c10::Device device) {
  const auto through = [&](OutputArchive& out) {
    std::stringstream stream;
    out.save_to(stream);
    auto in = std::make_unique<InputArchive>();
    in->load_from(stream, device);
    return in;
  };
  OutputArchive own;
  state.serialize(own);
  const auto members = through(own);
  OutputArchive changed;
  for (const std::string& key : members->keys()) {
    c10::IValue value;
    members->read(key, value);
    if (value.isTensor() && value.toTensor().defined()) value = convert(value.toTensor());
    changed.write(key, value);
  }
  auto copy = state.clone();
  copy->serialize(*through(changed));
  return copy;
}

}  // namespace

struct WholeOptimizer::Saved {
  std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())> state;
};

WholeOptimizer::WholeOptimizer(torch::optim::Optimizer& optimizer, bool writable)
    : optimizer_(optimizer), writable_(writable), saved_(std::make_unique<Saved>()) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto [unit, place] = owner_of(parameters[i]);
      if (!unit) continue;
      replaced_.push_back(
          {g, i, parameters[i], stand_in(unit->parameters()[place], parameters[i]), unit, place});
    }
  }
  if (!replaced_.empty()) gather_state();
  for (const Replaced& item : replaced_)
    optimizer.param_groups()[item.group].params()[item.index] = item.whole;
}

void WholeOptimizer::gather_state() {
  decltype(saved_->state) whole;
  for (const Replaced& item : replaced_) {
    const auto found = optimizer_.state().find(item.shard.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) continue;
    const auto gather = [&](const at::Tensor& tensor) {
      return tensor.sizes() == item.shard.sizes() ? item.unit->gathered(item.place, tensor)
                                                  : tensor;
    };
    whole[item.whole.unsafeGetTensorImpl()] =
        converted(*found->second, gather, item.shard.device());
  }
  for (const Replaced& item : replaced_) {
    const auto found = optimizer_.state().find(item.shard.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) continue;
    saved_->state[found->first] = std::move(found->second);
    optimizer_.state().erase(found);
  }
  for (auto& [key, state] : whole) optimizer_.state()[key] = std::move(state);
}

void WholeOptimizer::take_rows() {
  for (const Replaced& item : replaced_) {
    const auto found = optimizer_.state().find(item.whole.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) continue;
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.sizes() == item.whole.sizes()
                 ? item.unit->rows_of_whole(item.place, tensor).clone()
                 : tensor;
    };
    optimizer_.state()[item.shard.unsafeGetTensorImpl()] =
        converted(*found->second, rows, item.shard.device());
  }
}

WholeOptimizer::~WholeOptimizer() {
  const c10::AutoGradMode no_grad(false);
  if (writable_) {
    try {
      take_rows();
    } catch (const std::exception& error) {
      log::error(std::string("the rows of an optimizer's state were not taken over: ") +
                 error.what());
    }
  } else {
    for (auto& [key, state] : saved_->state) optimizer_.state()[key] = std::move(state);
  }
  for (const Replaced& item : replaced_) {
    optimizer_.state().erase(item.whole.unsafeGetTensorImpl());
    optimizer_.param_groups()[item.group].params()[item.index] = item.shard;
  }
}

}  // namespace weft::shard
