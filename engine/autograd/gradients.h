// Gradients by parameter, in the order in which they first came. Those on GPUs may not have been
// computed yet: whoever gets one makes the current stream wait for the stream that computes it. Not
// locked: who owns it does that.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/tensor/device_work.h>

namespace weft::autograd {

// Both may be dense or sparse, or undefined; neither is changed.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b);

class Gradients {
 public:
  // Adds to the parameter's gradient. Takes the memory over where nobody else uses it and its
  // layout is the parameter's; else copies (the rules of libtorch's AccumulateGrad). `held`: how
  // many references to `gradient` the caller has.
  void add(const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held);
  // What `earlier` is to another object, which this will be merged into, becomes part of the
  // parameter's gradient here: the merge then replaces it. `earlier` is copied, and may be
  // undefined.
  void absorb(const at::Tensor& parameter, const at::Tensor& earlier);
  // Whether a merge of this replaces the parameter's gradient.
  bool replaces(const at::Tensor& parameter) const {
    return absorbed_.contains(parameter.unsafeGetTensorImpl());
  }
  bool replaces_any() const { return !absorbed_.empty(); }
  // Adds all of another's, or puts it in the place of what it has absorbed; the other is empty
  // afterwards.
  void merge(Gradients&& other);
  // To be read and replaced; undefined for none. Valid until the object goes. renew() follows, on
  // the streams that were used.
  at::Tensor& of(const at::Tensor& parameter);
  void renew();
  // Null where there is none.
  const at::Tensor* find(const at::Tensor& parameter) const;
  // (parameter, gradient) where there is one.
  std::vector<std::pair<at::Tensor, at::Tensor>> all() const;
  bool empty() const { return all_.empty(); }

 private:
  struct One {
    at::Tensor parameter;
    at::Tensor gradient;
    weft::detail::DeviceWorkRef work;  // that computes it
    bool given = false;                // by of(), since the last renew()
  };
  One& one_of(const at::Tensor& parameter);
  static void take(const One& one);
  static void enqueued(One& one);

  std::deque<One> all_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
  std::unordered_set<const c10::TensorImpl*> absorbed_;
};

}  // namespace weft::autograd
