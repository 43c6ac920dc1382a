// Gradients by parameter, in the order in which they first came. Not locked: who owns it does that.
#pragma once

#include <deque>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

namespace weft::autograd {

class Gradients {
 public:
  // Adds to the parameter's gradient. Takes the memory over where nobody else uses it and its layout is the parameter's;
  // else copies (the rules of libtorch's AccumulateGrad). `held`: how many references to `gradient` the caller has.
  void add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held);
  // Adds all of another's, which is empty afterwards.
  void merge(Gradients&& other);
  // To be read and replaced; undefined for none. Valid until the object goes.
  at::Tensor& of(const at::Tensor& parameter);
  // Null where there is none.
  at::Tensor* find(const at::Tensor& parameter);
  const std::deque<std::pair<at::Tensor, at::Tensor>>& all() const { return all_; }
  bool empty() const { return all_.empty(); }

 private:
  std::deque<std::pair<at::Tensor, at::Tensor>> all_;  // parameter, gradient
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
};

}  // namespace weft::autograd
