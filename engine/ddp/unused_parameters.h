// SPDX-License-Identifier: Apache-2.0
// The parameters for which a pass brings no gradient: zeros are averaged in their place, and a
// parameter that no rank uses has the same gradient after the pass as before it.
//
// The reducer owns it, and the reducer's mutex guards it. wait_for_usage() blocks, and
// is_used_anywhere() may copy from the GPU; nothing else blocks.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/ddp/gradient_buckets.h>
#include <weft/engine/ddp/reducer_state.h>
#include <weft/engine/ddp/trained_parameters.h>

namespace weft::parallel {

class UnusedParameters {
 public:
  // The arguments must outlive it.
  UnusedParameters(const TrainedParameters& parameters, const GradientBuckets& buckets)
      : parameters_(parameters),
        buckets_(buckets),
        usage_(parameters.size()),
        kept_(parameters.size()) {}

  // Which parameters had a gradient, on this rank and on any rank.
  Usage& usage() { return usage_; }

  // Begins a pass that does not use `unused`; leaves out those without a place in a bucket.
  void begin_pass(std::vector<std::size_t> unused);
  // Begins a pass in which this rank has no gradients. If the ranks count usage, their counts say
  // which parameters the others use, and the rest has no gradient afterwards, as on a rank that
  // zeroes its gradients before each step.
  void begin_mirrored_pass(bool is_usage_counted);
  // Adds a parameter whose slot has been filled, or is filled next.
  void add(std::size_t parameter) { unused_.push_back(parameter); }
  // Adds those that were frozen on all ranks after their buckets were made, and still are.
  void add_frozen();
  // Adds those of them that have been thawed since the last forward and whose slots are empty: no
  // older forward has brought a gradient.
  void add_thawed();
  // Adds those whose slots are empty: they are behind outputs that the loss leaves out, although
  // the forward used them.
  void add_missing();
  bool contain(std::size_t parameter) const;

  // True if parameters may have been added since the last call. The caller then calls keep() and
  // GradientBuckets::fill() for all() whose slots are empty.
  bool are_to_be_filled() { return !std::exchange(filled_, true); }
  const std::vector<std::size_t>& all() const { return unused_; }
  // Copies the gradient that the parameter has.
  void keep(std::size_t parameter);

  // Known with a static graph once it has been counted; without one, every parameter that takes
  // part is used.
  bool is_used_anywhere(std::size_t parameter);
  void wait_for_usage(const c10::Device& device) { wait_in_backward(usage_.take_work(), device); }
  // Ends a pass. A parameter that no rank used gets back the gradient it had, or none. One that
  // another rank used keeps the average.
  void restore();
  // Forgets a pass that has failed.
  void drop_pass();

  // Throws Caller if a frozen parameter has a gradient from no_sync that no pass will average: the
  // ranks would step the parameter differently.
  void require_no_frozen_rest() const;

 private:
  // Adds those of the parameters that the last forward did not train.
  void add_untrained(const std::function<bool(std::size_t)>& is_meant);

  const TrainedParameters& parameters_;
  const GradientBuckets& buckets_;
  Usage usage_;
  std::vector<std::size_t> unused_;
  bool filled_ = false;           // zeros have been put into the slots of unused_
  std::vector<at::Tensor> kept_;  // by parameter: its former gradient
};

}  // namespace weft::parallel
