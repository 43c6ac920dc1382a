#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <weft/engine/autograd/gradients.h>

namespace weft::autograd {

void Gradients::add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
  const c10::AutoGradMode no_grad(false);
  const auto [found, fresh] = places_.try_emplace(parameter.unsafeGetTensorImpl(), all_.size());
  if (fresh) all_.emplace_back(parameter, at::Tensor());
  at::Tensor& sum = all_[found->second].second;
  // Another tensor may lie in the same memory, or a message that is still being sent.
  if (gradient.layout() == at::kStrided && gradient.has_storage() && gradient.storage().use_count() > 1) held = 0;
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, sum, gradient, held, [&](at::Tensor&& result) { sum = std::move(result); });
}

void Gradients::merge(Gradients&& other) {
  for (auto& [parameter, gradient] : other.all_) {
    if (!gradient.defined()) continue;
    if (const at::Tensor* sum = find(parameter); sum == nullptr || !sum->defined()) {
      set(parameter, std::move(gradient));
    } else {
      add(parameter, gradient, 1);
    }
  }
  other = Gradients();
}

void Gradients::set(const at::Tensor& parameter, at::Tensor gradient) {
  const auto [found, fresh] = places_.try_emplace(parameter.unsafeGetTensorImpl(), all_.size());
  if (fresh) all_.emplace_back(parameter, at::Tensor());
  all_[found->second].second = std::move(gradient);
}

at::Tensor* Gradients::find(const at::Tensor& parameter) {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  return found == places_.end() ? nullptr : &all_[found->second].second;
}

}  // namespace weft::autograd
