// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/engine/group/access.h>
#include <weft/engine/shard/mirrored_steps.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::shard {

namespace {

constinit Clip mirrored_clip = nullptr;

}  // namespace

void set_mirrored_clip(Clip clip) { mirrored_clip = clip; }

void MirroredSteps::mirror_step(int leader, int divisor) {
  const c10::AutoGradMode no_grad(false);
  {
    MutexLock lock(model_.mutex_);
    model_.drop_failed();
    model_.forget_reductions();
    model_.gathered_.drop();
    for (const auto& unit : model_.units_) unit->divisor = divisor;
  }
  for (;;) {
    const StepMessage told = messages_.receive(leader);
    if (told.kind() == StepMessage::End) return finish_reductions();
    mirror(told);
  }
}

void MirroredSteps::mirror(const StepMessage& told) {
  if (told.kind() == StepMessage::Gather) return gather(told.which());
  if (told.kind() == StepMessage::Reduce) return reduce(told);
  if (told.kind() == StepMessage::Sum) return sum(told);
  finish_reductions();
  if (told.kind() == StepMessage::Clear) {
    MutexLock lock(model_.mutex_);
    return clear(model_.units_.at(told.which())->shards(), told);
  }
  if (told.kind() == StepMessage::Zero) return optimizers_.at(told.which())->zero_gradients();
  const std::vector<double> given = told.doubles();
  if (told.kind() == StepMessage::Step) return optimizers_.at(told.which())->step(given);
  mirrored_clip(module_, given[0], given[1]);
}

// Waits for the values, which nobody uses here: their memory is free before the next gather.
void MirroredSteps::gather(std::size_t which) {
  MutexLock lock(model_.mutex_);
  Unit& unit = *model_.units_.at(which);
  unit.start_gather();
  unit.finish_gather();
  unit.free();
}

// Starts all parts of the reduction that do not depend on later ones of other ranks.
void MirroredSteps::reduce(const StepMessage& told) {
  MutexLock lock(model_.mutex_);
  const Unit& unit = *model_.units_.at(told.which());
  const std::vector<at::Tensor> shards = unit.shards();
  Mirrored mirrored;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!told.has(StepMessage::Trained, i)) continue;
    if (!shards[i].requires_grad()) {
      throw Error(Blame::Caller,
                  "join: parameter '" + unit.parameters()[i].name + "' is frozen on rank " +
                      std::to_string(unit.ranks().all.rank()) +
                      ", which has run out, and trained by others; freeze and thaw parameters "
                      "outside of join");
    }
    parameters.push_back(i);
    mirrored.shards.push_back(shards[i]);
  }
  clear(shards, told);
  mirrored.gradients.resize(parameters.size());
  mirrored.reduction =
      model_.reducer_.reduce(unit, parameters, mirrored.gradients, mirrored.gradients);
  mirrored.reduction->order->advance(*mirrored.reduction);
  mirrored_.push_back(std::move(mirrored));
}

void MirroredSteps::sum(const StepMessage& told) {
  const Unit& unit = *model_.units_.front();
  const std::vector<double> given = told.doubles();
  const at::TensorOptions options(static_cast<at::ScalarType>(given[0]));
  ProcessGroup group = unit.ranks().groups().at(static_cast<std::size_t>(given[1]));
  at::Tensor zeros = at::zeros(
      {static_cast<std::int64_t>(told.which())},
      options.device(unit.device().is_cpu() ? group::host_values_device(group) : group.device()));
  group::all_reduce(group, zeros, ReduceOp::Sum).wait();
}

void MirroredSteps::clear(const std::vector<at::Tensor>& shards, const StepMessage& told) const {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    at::Tensor& gradient = shards[i].mutable_grad();
    const bool has_none = told.has(StepMessage::None, i);
    const bool has_zeros = told.has(StepMessage::Zeros, i);
    if (has_none && has_zeros) {  // a stand-in: no_sync() has kept gradients, perhaps here as well
      if (!is_stand_in(gradient)) gradient.reset();
    } else if (has_none) {
      gradient.reset();
    } else if (has_zeros) {  // of its own, where this rank has dropped what others have zeroed
      gradient = at::zeros_like(shards[i].detach());
    }
  }
  model_.reducer_.kept().drop_zeroed();
}

void MirroredSteps::finish_reductions() {
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> gradients;
  for (Mirrored& mirrored : std::exchange(mirrored_, {})) {
    mirrored.reduction->wait();
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& shard : mirrored.shards) dtypes.push_back(shard.scalar_type());
    mirrored.reduction->finish(mirrored.gradients, dtypes);
    mirrored.reduction->wait_for_host();
    for (std::size_t i = 0; i < mirrored.shards.size(); ++i) {
      if (!mirrored.gradients[i].defined()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(mirrored.shards[i]));
      gradients.push_back(std::move(mirrored.gradients[i]));
    }
  }
  // The engine calls the hooks of the shards too.
  if (!edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        edges, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  model_.units_.front()->offload->wait();
}

}  // namespace weft::shard
