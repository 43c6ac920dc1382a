// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/pass_gradients.h>

namespace weft::autograd {

void PassGradients::add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
  MutexLock lock(mutex_);
  gradients_.add(parameter, gradient, held);
}

at::Tensor& PassGradients::of(const at::Tensor& parameter) {
  MutexLock lock(mutex_);
  return gradients_.of(parameter);
}

void PassGradients::absorb(const at::Tensor& parameter) {
  context_.passes().require_no_other(pass_);
  const at::Tensor earlier = context_.passes().gradient(parameter);
  MutexLock lock(mutex_);
  gradients_.absorb(parameter, earlier);
}

void PassGradients::renew() {
  MutexLock lock(mutex_);
  gradients_.renew();
}

Gradients PassGradients::take() {
  MutexLock lock(mutex_);
  return std::move(gradients_);
}

}  // namespace weft::autograd
