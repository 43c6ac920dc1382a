// SPDX-License-Identifier: Apache-2.0
// The parameters' gradients of one backward pass on this worker.
//
// Owned by the pass. Usable from every thread while the pass runs. The mutex is held while kernels
// are enqueued that add gradients up.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/autograd/ids.h>

namespace weft::autograd {

class Context;

class PassGradients {
 public:
  // Both outlive this object.
  PassGradients(Context& context, const PassName& pass) : context_(context), pass_(pass) {}
  // As Gradients::add().
  void add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held);
  // Returns the gradient that this pass has computed for the parameter so far; it is undefined
  // before the first. The caller may replace it. The reference is valid while the pass runs.
  at::Tensor& of(const at::Tensor& parameter);
  // Adds the context's gradient of earlier passes to that one, which replaces the sum when this
  // pass succeeds. Throws Caller if the gradients of earlier passes are not known yet.
  void absorb(const at::Tensor& parameter);
  // Called when nobody uses the references of of() any more.
  void renew();
  // Called when the pass has ended.
  Gradients take();

 private:
  Context& context_;
  const PassName& pass_;
  Mutex mutex_;
  Gradients gradients_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
