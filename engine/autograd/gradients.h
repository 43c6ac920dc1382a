// SPDX-License-Identifier: Apache-2.0
// Gradients by parameter, in the order in which they first came. Those on GPUs may not have been
// computed yet: every function that returns one makes the current stream wait for it. Not
// thread-safe; the owner locks.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/tensor/device_work.h>

namespace weft::autograd {

// Returns the sum. Each may be dense, sparse or undefined; neither is changed.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b);

class Gradients {
 public:
  // Adds to the parameter's gradient. Takes the memory over if nobody else uses it and its layout
  // is the parameter's; copies otherwise (the rules of libtorch's AccumulateGrad). `held`: the
  // number of references to `gradient` that the caller has.
  void add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held);
  // Adds the gradient `earlier` of another object, into which this will be merged, to the gradient
  // here; the merge then replaces that one. Copies `earlier`, which may be undefined.
  void absorb(const at::Tensor& parameter, const at::Tensor& earlier);
  // True if a merge of this object replaces the parameter's gradient.
  bool replaces(const at::Tensor& parameter) const {
    return absorbed_.contains(parameter.unsafeGetTensorImpl());
  }
  bool replaces_any() const { return !absorbed_.empty(); }
  // Adds all gradients of `other`; those that have absorbed an earlier gradient replace it instead.
  // Empties `other`.
  void merge(Gradients&& other);
  // The parameter's gradient, to be read and replaced; undefined if there is none. Valid as long as
  // this object. Call renew() afterwards, on the streams that were used.
  at::Tensor& of(const at::Tensor& parameter);
  void renew();
  // Null if there is none.
  const at::Tensor* find(const at::Tensor& parameter) const;
  // All (parameter, gradient) pairs with a defined gradient.
  std::vector<std::pair<at::Tensor, at::Tensor>> all() const;
  bool empty() const { return all_.empty(); }

 private:
  struct One {
    at::Tensor parameter;
    at::Tensor gradient;
    weft::detail::DeviceWorkRef work;  // the work that computes the gradient
    bool given = false;                // returned by of() since the last renew()
  };
  One& one_of(const at::Tensor& parameter);
  static void take(const One& one);
  static void enqueued(One& one);

  std::deque<One> all_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
  std::unordered_set<const c10::TensorImpl*> absorbed_;
};

}  // namespace weft::autograd
