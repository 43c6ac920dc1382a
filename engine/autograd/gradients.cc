// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <weft/engine/autograd/gradients.h>

namespace weft::autograd {

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.is_sparse() ? b.add(a) : a.add(b);  // a sparse tensor cannot add a dense one
}

Gradients::One& Gradients::one_of(const at::Tensor& parameter) {
  const auto [found, fresh] = places_.try_emplace(parameter.unsafeGetTensorImpl(), all_.size());
  if (fresh) all_.push_back({parameter, at::Tensor(), nullptr});
  return all_[found->second];
}

// Makes the current stream wait for the gradient and use its memory from now on.
void Gradients::take(const One& one) {
  if (!one.work) return;
  one.work->wait();
  weft::detail::hand_over({&one.gradient});
}

// Notes that the current stream computes the gradient.
void Gradients::enqueued(One& one) {
  const bool is_there = !one.gradient.defined() || one.gradient.is_cpu();
  one.work = is_there ? nullptr : weft::detail::enqueued_for({&one.gradient});
}

at::Tensor& Gradients::of(const at::Tensor& parameter) {
  One& one = one_of(parameter);
  take(one);
  one.given = true;
  return one.gradient;
}

void Gradients::renew() {
  for (One& one : all_) {
    if (std::exchange(one.given, false)) enqueued(one);
  }
}

void Gradients::add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
  const c10::AutoGradMode no_grad(false);
  One& one = one_of(parameter);
  take(one);
  // The memory may be shared with another tensor, or with a message that is still being sent.
  if (gradient.layout() == at::kStrided && gradient.has_storage() &&
      gradient.storage().use_count() > 1)
    held = 0;
  torch::autograd::AccumulateGrad::accumulateGrad(
      parameter, one.gradient, gradient, held,
      [&](at::Tensor&& result) { one.gradient = std::move(result); });
  enqueued(one);
}

void Gradients::absorb(const at::Tensor& parameter, const at::Tensor& earlier) {
  const c10::AutoGradMode no_grad(false);
  absorbed_.insert(parameter.unsafeGetTensorImpl());
  if (!earlier.defined()) return;
  One& one = one_of(parameter);
  take(one);
  one.gradient = one.gradient.defined() ? sum_of(one.gradient, earlier) : earlier.clone();
  enqueued(one);
}

void Gradients::merge(Gradients&& other) {
  for (One& theirs : other.all_) {
    if (!theirs.gradient.defined()) continue;
    if (One& one = one_of(theirs.parameter);
        !one.gradient.defined() || other.replaces(theirs.parameter)) {
      one.gradient = std::move(theirs.gradient);
      one.work = std::move(theirs.work);
    } else {
      take(theirs);
      add(theirs.parameter, theirs.gradient, 1);
    }
  }
  other = Gradients();
}

const at::Tensor* Gradients::find(const at::Tensor& parameter) const {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  if (found == places_.end()) return nullptr;
  const One& one = all_[found->second];
  take(one);
  return &one.gradient;
}

std::vector<std::pair<at::Tensor, at::Tensor>> Gradients::all() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> result;
  for (const One& one : all_) {
    if (!one.gradient.defined()) continue;
    take(one);
    result.emplace_back(one.parameter, one.gradient);
  }
  return result;
}

}  // namespace weft::autograd
