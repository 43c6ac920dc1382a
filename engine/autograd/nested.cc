// SPDX-License-Identifier: Apache-2.0
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/nested.h>

namespace weft::autograd {

using torch::autograd::AccumulateGrad;

namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;

// Keeps the `.grad` of leaves while nodes on several threads may run nested passes that write
// there.
class KeptGrads {
 public:
  void keep(const at::Tensor& leaf) {
    MutexLock lock(mutex_);
    Kept& kept = kept_[leaf.unsafeGetTensorImpl()];
    if (kept.nodes++ == 0) kept.grad = std::exchange(leaf.mutable_grad(), at::Tensor());
  }
  // `leaf` is undefined if the leaf has been destroyed.
  void give_back(const at::TensorImpl* which, const at::Tensor& leaf) {
    at::Tensor dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    const auto found = kept_.find(which);
    if (--found->second.nodes > 0) return;
    dropped = leaf.defined() ? std::exchange(leaf.mutable_grad(), std::move(found->second.grad))
                             : found->second.grad;
    kept_.erase(found);
  }

 private:
  struct Kept {
    int nodes = 0;
    at::Tensor grad;
  };
  Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Kept> kept_ WEFT_GUARDED_BY(mutex_);
};

KeptGrads& kept_grads() {
  // Never destroyed: the engine's threads may use it when the process ends.
  static KeptGrads* const all = new KeptGrads();
  return *all;
}

// The key of State in ThreadLocalDebugInfo; it is only compared. In older releases keys are an
// enum, so this is a value that libtorch does not use.
template <class Kind>
Kind own_kind() {
  static constexpr std::string_view name = "weft::autograd::NestedPasses";
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x77);
  } else {
    return Kind(&name);
  }
}

}  // namespace

// libtorch passes it on to the engine's threads, as it does the callbacks.
struct NestedPasses::State : c10::DebugInfoBase {
  struct Leaf {
    WeakTensor tensor;
    at::Tensor gradient;
  };
  Mutex mutex;
  std::unordered_map<const at::TensorImpl*, Leaf> leaves;

  void add(const at::Tensor& leaf, const at::Tensor& gradient) {
    MutexLock lock(mutex);
    const auto [found, is_new] = leaves.try_emplace(leaf.unsafeGetTensorImpl(),
                                                    Leaf{WeakTensor(leaf.getIntrusivePtr()), {}});
    if (is_new) kept_grads().keep(leaf);
    const c10::AutoGradMode no_grad(false);
    // Refers to the tensor itself, not to another one over its memory, so that libtorch neither
    // takes it over as `.grad` nor adds to it in place.
    found->second.gradient = sum_of(found->second.gradient, gradient);
  }
};

bool runs_user_code(torch::autograd::Node& node) {
  if (!node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty())
    return true;
  const std::string_view type = typeid(node).name();  // mangled as in the Itanium ABI
  if (type.starts_with("N4weft8autograd")) return false;
  return !type.starts_with("N5torch8autograd") || type.starts_with("N5torch8autograd7CppNode") ||
         type.starts_with("N5torch8autograd6PyNode");
}

NestedPasses::NestedPasses() : state_(std::make_shared<State>()) {
  c10::ThreadLocalDebugInfo::_push(own_kind<c10::DebugInfoKind>(), state_);
  const auto start =
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    const auto node = torch::autograd::get_current_node();
    const auto* const leaf = dynamic_cast<const AccumulateGrad*>(node.get());
    auto* const state =
        static_cast<State*>(c10::ThreadLocalDebugInfo::get(own_kind<c10::DebugInfoKind>()));
    if (leaf == nullptr || state == nullptr || function.inputs().empty()) return nullptr;
    const c10::IValue& gradient = function.inputs()[0];
    if (gradient.isTensor() && gradient.toTensor().defined())
      state->add(leaf->variable, gradient.toTensor());
    return nullptr;
  };
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(start).needsInputs(true).scopes(
      {at::RecordScope::BACKWARD_FUNCTION}));
}

NestedPasses::~NestedPasses() {
  at::removeCallback(callback_);
  static_cast<void>(c10::ThreadLocalDebugInfo::_pop(own_kind<c10::DebugInfoKind>()));
  for (const auto& [which, leaf] : state_->leaves) {
    const auto alive = leaf.tensor.lock();
    kept_grads().give_back(which, alive ? at::Tensor(alive) : at::Tensor());
  }
}

void NestedPasses::take(
    const std::function<void(const at::Tensor&, const at::Tensor&)>& accumulate) {
  for (auto& [which, leaf] : state_->leaves) {
    auto alive = leaf.tensor.lock();
    if (!alive) continue;
    const at::Tensor gradient = std::exchange(leaf.gradient, {});
    accumulate(at::Tensor(std::move(alive)),
               gradient.requires_grad() ? gradient.detach() : gradient);
  }
}

}  // namespace weft::autograd
