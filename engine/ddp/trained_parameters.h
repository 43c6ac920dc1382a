// SPDX-License-Identifier: Apache-2.0
// The model's parameters, as the reducer knows them: which of them are trained, and whether they
// have changed since their gradients got a place in a bucket. The reducer owns it, and
// the reducer's mutex guards it. compare() and compare_changes() are collective and block; nothing
// else does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <weft/engine/group/process_group.h>

namespace weft::parallel {

struct ReducerParameter {
  std::string name;
  at::Tensor tensor;  // a leaf; its gradient is averaged while it requires one
  bool sparse_gradient = false;
};

// The gradient that this thread's backward writes for the parameter: the pass of an AutogradContext
// has its own gradients.
at::Tensor& gradient_of(const at::Tensor& parameter);

class TrainedParameters {
 public:
  TrainedParameters(std::vector<ReducerParameter> parameters, ProcessGroup group);

  std::size_t size() const { return parameters_.size(); }
  const ReducerParameter& operator[](std::size_t parameter) const { return parameters_[parameter]; }
  bool contain(const at::Tensor& parameter) const;
  // For errors: numbers, names and this rank. Shows at most 20 parameters.
  std::string names_of(const std::vector<std::size_t>& parameters) const;

  // By parameter: requires a gradient at this moment.
  std::vector<bool> trained_now() const;
  // True if the parameter required a gradient at the last forward that synchronised.
  bool is_trained(std::size_t parameter) const { return trained_[parameter]; }
  void set_trained(std::vector<bool> trained) { trained_ = std::move(trained); }
  // True if the parameter required a gradient at some forward. Each forward notes it.
  bool was_ever_trained(std::size_t parameter) const { return ever_trained_[parameter]; }
  void note_trained();

  // True if type, device and shape are those that the parameter had at the last set_layout(), or
  // when the reducer was made.
  bool keeps_layout(std::size_t parameter) const;
  void set_layout(std::size_t parameter);

  // Collective: the ranks compare which parameters require a gradient now. `changed`: the changes
  // that this rank knows of. Throws Caller on all ranks if they differ.
  void compare(const std::vector<std::size_t>& changed);
  // Calls compare() if a parameter of `bucket` was frozen or thawed after the last comparison: a
  // parameter that is frozen between its forward and its backward brings no gradient, and a rank
  // that has frozen it alone would reduce stale bytes in its place.
  void compare_changes(const std::vector<std::size_t>& bucket);

 private:
  struct Layout {
    explicit Layout(const at::Tensor& tensor)
        : dtype(tensor.scalar_type()),
          device(tensor.device()),
          sizes(tensor.sizes().begin(), tensor.sizes().end()) {}
    friend bool operator==(const Layout&, const Layout&) = default;
    at::ScalarType dtype;
    c10::Device device;
    c10::SmallVector<std::int64_t, 5> sizes;
  };

  const std::vector<ReducerParameter> parameters_;
  ProcessGroup group_;
  std::vector<Layout> layouts_;  // the members from here on are by parameter
  std::vector<bool> trained_;
  std::vector<bool> compared_;  // required a gradient when the ranks last compared it
  std::vector<bool> ever_trained_;
};

}  // namespace weft::parallel
