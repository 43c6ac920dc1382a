#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <weft/engine/autograd/gradients.h>

namespace weft::autograd {

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.is_sparse() ? b.add(a) : a.add(b);  // a sparse one takes no dense one
}

at::Tensor& Gradients::of(const at::Tensor& parameter) {
  const auto [found, fresh] = places_.try_emplace(parameter.unsafeGetTensorImpl(), all_.size());
  if (fresh) all_.emplace_back(parameter, at::Tensor());
  return all_[found->second].second;
}

void Gradients::add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& sum = of(parameter);
  // Another tensor may lie in the same memory, or a message that is still being sent.
  if (gradient.layout() == at::kStrided && gradient.has_storage() && gradient.storage().use_count() > 1) held = 0;
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, sum, gradient, held,
                                                  [&](at::Tensor&& result) { sum = std::move(result); });
}

void Gradients::absorb(const at::Tensor& parameter, const at::Tensor& earlier) {
  const c10::AutoGradMode no_grad(false);
  absorbed_.insert(parameter.unsafeGetTensorImpl());
  if (!earlier.defined()) return;
  at::Tensor& gradient = of(parameter);
  gradient = gradient.defined() ? sum_of(gradient, earlier) : earlier.clone();
}

void Gradients::merge(Gradients&& other) {
  for (auto& [parameter, gradient] : other.all_) {
    if (!gradient.defined()) continue;
    if (at::Tensor& sum = of(parameter); !sum.defined() || other.replaces(parameter)) {
      sum = std::move(gradient);
    } else {
      add(parameter, gradient, 1);
    }
  }
  other = Gradients();
}

at::Tensor* Gradients::find(const at::Tensor& parameter) {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  return found == places_.end() ? nullptr : &all_[found->second].second;
}

}  // namespace weft::autograd
