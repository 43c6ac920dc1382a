// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/base/mutex.h>
#include <weft/engine/shard/gradient_versions.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::shard {

class GradientVersions::Noted {
 public:
  void add_unit(std::size_t parameters) {
    MutexLock lock(mutex_);
    all_.emplace_back(parameters);
  }
  void note(std::size_t unit, std::size_t parameter, const at::Tensor& gradient) {
    One one;
    if (gradient.defined()) one = {gradient.storage().getWeakStorageImpl(), gradient._version()};
    MutexLock lock(mutex_);
    all_[unit][parameter] = std::move(one);
  }
  bool is_as_noted(std::size_t unit, std::size_t parameter, const at::Tensor& gradient) const {
    MutexLock lock(mutex_);
    const One& one = all_[unit][parameter];
    const auto storage = one.storage.lock();
    return storage && storage.get() == gradient.storage().unsafeGetStorageImpl() &&
           gradient._version() == one.version;
  }

 private:
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // The storage identifies a gradient. The tensor does not: libtorch replaces it by a detached one
  // before it zeroes it.
  struct One {
    Storage storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::int64_t version = 0;
  };
  mutable Mutex mutex_;
  std::vector<std::vector<One>> all_ WEFT_GUARDED_BY(mutex_);  // by unit and parameter
};

struct GradientVersions::Hook {
  at::Tensor shard;
  std::size_t unit, parameter;
  NodePtr<torch::autograd::Node> accumulator;
  std::uintptr_t key = 0;
};

namespace {

class Notes final : public torch::autograd::FunctionPostHook {
 public:
  Notes(std::shared_ptr<GradientVersions::Noted> noted, const at::Tensor& shard, std::size_t unit,
        std::size_t parameter)
      : noted_(std::move(noted)),
        shard_(shard.getIntrusivePtr()),
        unit_(unit),
        parameter_(parameter) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (auto shard = shard_.lock()) noted_->note(unit_, parameter_, at::Tensor(shard).grad());
    return outputs;
  }

 private:
  const std::shared_ptr<GradientVersions::Noted> noted_;
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> shard_;
  const std::size_t unit_, parameter_;
};

}  // namespace

bool only_notes(const torch::autograd::FunctionPostHook& hook) {
  return dynamic_cast<const Notes*>(&hook) != nullptr;
}

GradientVersions::GradientVersions(const std::vector<std::shared_ptr<Unit>>& units)
    : noted_(std::make_shared<Noted>()) {
  for (const auto& unit : units) {
    const std::vector<at::Tensor> shards = unit->shards();
    noted_->add_unit(shards.size());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      Hook hook{shards[i], unit->index, i, {}};
      if (shards[i].requires_grad()) {
        hook.accumulator = torch::autograd::impl::grad_accumulator(shards[i]);
        hook.key = hook.accumulator->add_post_hook(
            std::make_unique<Notes>(noted_, shards[i], unit->index, i));
      }
      hooks_.push_back(std::move(hook));
    }
  }
  note_all();
}

GradientVersions::~GradientVersions() {
  for (const Hook& hook : hooks_) {
    if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
  }
}

void GradientVersions::note_all() {
  for (const Hook& hook : hooks_) noted_->note(hook.unit, hook.parameter, hook.shard.grad());
}

bool GradientVersions::is_written(const Unit& unit, std::size_t parameter,
                                  const at::Tensor& gradient) const {
  return !noted_->is_as_noted(unit.index, parameter, gradient);
}

}  // namespace weft::shard
