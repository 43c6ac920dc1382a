// SPDX-License-Identifier: Apache-2.0
// The element functions of the optimizer steps: SGD and Adam as torch::optim computes them, in one
// pass over memory. Operations are in libtorch's order, so fp32 and fp64 results differ from
// libtorch's only by its fused multiply-adds. fp16 and bf16 are computed in fp32 and rounded once
// when stored, as in libtorch's fused kernels; libtorch's C++ optimizers round after every
// operation.
#pragma once

#include <weft/kernels/elements.h>

namespace weft::kernels {

// P: type of parameter and state; G: type of the gradient.
template <class P>
struct SgdScalars {
  using Scalar = Compute<P>;
  Scalar lr, weight_decay, momentum, undampened;  // undampened = 1 - dampening
  bool nesterov, maximize;
  bool first_step;  // the momentum buffer has no value yet and becomes the gradient
};

template <class P, class G>
WEFT_HOST_DEVICE Compute<P> decayed_gradient(const SgdScalars<P>& scalars, const G& gradient,
                                             Compute<P> parameter) {
  Compute<P> g = widen(gradient);
  if (scalars.maximize) g = -g;
  if (scalars.weight_decay != 0) g = g + scalars.weight_decay * parameter;
  return g;
}

template <class P, class G>
struct Sgd : SgdScalars<P> {
  using Arrays = ArrayList<In<G>, InOut<P>>;

  WEFT_HOST_DEVICE void operator()(const G& gradient, P& parameter) const {
    const Compute<P> p = widen(parameter);
    parameter = narrow<P>(p - this->lr * decayed_gradient(*this, gradient, p));
  }
};

template <class P, class G>
struct SgdMomentum : SgdScalars<P> {
  using Arrays = ArrayList<In<G>, InOut<P>, InOut<P>>;

  WEFT_HOST_DEVICE void operator()(const G& gradient, P& parameter, P& momentum_buffer) const {
    const Compute<P> p = widen(parameter);
    const Compute<P> g = decayed_gradient(*this, gradient, p);
    const Compute<P> kept = this->momentum * widen(momentum_buffer) + this->undampened * g;
    const Compute<P> b = this->first_step ? g : kept;
    momentum_buffer = narrow<P>(b);
    parameter = narrow<P>(p - this->lr * (this->nesterov ? g + this->momentum * b : b));
  }
};

// The scalars of one step. The host computes the bias corrections in fp64, as libtorch does.
template <class P>
struct AdamScalars {
  using Scalar = Compute<P>;
  Scalar decay;         // first multiplies the parameter: 1 - lr * weight_decay; 1 for L2
  Scalar l2;            // times the parameter, added to the gradient: weight_decay for L2; else 0
  Scalar beta1, rest1;  // rest = 1 - beta
  Scalar beta2, rest2;
  Scalar correction2;  // sqrt(1 - beta2^step)
  Scalar step_size;    // lr / (1 - beta1^step)
  Scalar eps;
  bool maximize;
};

template <class P, class G>
WEFT_HOST_DEVICE void adam_step(const AdamScalars<P>& scalars, const G& gradient, P& parameter,
                                P& exp_avg, P& exp_avg_sq, P* max_exp_avg_sq) {
  const Compute<P> p = widen(parameter) * scalars.decay;
  Compute<P> g = widen(gradient);
  if (scalars.maximize) g = -g;
  if (scalars.l2 != 0) g = g + scalars.l2 * p;
  const Compute<P> m = scalars.beta1 * widen(exp_avg) + scalars.rest1 * g;
  const Compute<P> v = scalars.beta2 * widen(exp_avg_sq) + scalars.rest2 * g * g;
  exp_avg = narrow<P>(m);
  exp_avg_sq = narrow<P>(v);
  Compute<P> second = v;
  if (max_exp_avg_sq != nullptr) {
    second = maximum(widen(*max_exp_avg_sq), v);
    *max_exp_avg_sq = narrow<P>(second);
  }
  const Compute<P> denominator = std::sqrt(second) / scalars.correction2 + scalars.eps;
  parameter = narrow<P>(p - scalars.step_size * m / denominator);
}

template <class P, class G>
struct Adam : AdamScalars<P> {
  using Arrays = ArrayList<In<G>, InOut<P>, InOut<P>, InOut<P>>;

  WEFT_HOST_DEVICE void operator()(const G& gradient, P& parameter, P& exp_avg,
                                   P& exp_avg_sq) const {
    adam_step<P, G>(*this, gradient, parameter, exp_avg, exp_avg_sq, nullptr);
  }
};

template <class P, class G>
struct AdamAmsgrad : AdamScalars<P> {
  using Arrays = ArrayList<In<G>, InOut<P>, InOut<P>, InOut<P>, InOut<P>>;

  WEFT_HOST_DEVICE void operator()(const G& gradient, P& parameter, P& exp_avg, P& exp_avg_sq,
                                   P& max_exp_avg_sq) const {
    adam_step<P, G>(*this, gradient, parameter, exp_avg, exp_avg_sq, &max_exp_avg_sq);
  }
};

}  // namespace weft::kernels
