// SPDX-License-Identifier: Apache-2.0
// Checks that the ranks of a DistributedDataParallel still have the same parameters. They start
// with rank 0's and apply the same averaged gradients, so they keep the same bits unless the
// program changes something on one rank alone: an optimizer with other options or another state,
// weights that are loaded or initialised there, a gradient that is changed after backward.
//
// In steps 2, 4, 8, …, 1024, 2048, 3072, … each rank writes sums over each parameter to the group's
// store. One step later, when all must have written theirs, rank 0 compares them and warns, once.
// No rank waits for another. Differences within rounding are ignored: ranks with other CPUs or
// other numbers of threads may differ in the last bits. Only parameters on the host are checked;
// those on a GPU would have to be waited for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::parallel {

class ParameterCheck {
 public:
  // `model`: its number in the group, the same on all ranks.
  ParameterCheck(ProcessGroup group, std::uint32_t model);

  struct Parameter {
    std::string name;
    at::Tensor tensor;
  };
  // True if look() would do something in that step.
  bool is_due(std::uint32_t step) const;
  // Called by the forward of that step; steps count from 1. `parameters`: those that are trained,
  // the same on all ranks. Throws nothing: if its store fails, training goes on.
  void look(std::uint32_t step, const std::vector<Parameter>& parameters) noexcept;

  // The warning, for tests.
  static constexpr const char* kWarning = "the ranks have different parameters";

  // Sums over a parameter's elements.
  struct Sums {
    double values, magnitudes;
  };
  static Sums sums_of(const at::Tensor& tensor);
  // True if they differ by more than rounding.
  static bool differ(const Sums& one, const Sums& other);

 private:
  std::string key_of(int rank) const;
  void leave(std::uint32_t step, const std::vector<Parameter>& parameters);
  void compare(const std::vector<Parameter>& parameters);
  void warn(const std::vector<int>& ranks, const std::string& first);

  ProcessGroup group_;
  const std::uint32_t model_;
  std::uint32_t next_ = 2;     // the step in which sums are written next
  std::uint32_t left_in_ = 0;  // the step in which they were written; 0: they have been compared
  std::vector<Sums> mine_;     // this rank's sums of that step
  bool is_over_ = false;       // it has warned, or its store has failed
};

}  // namespace weft::parallel
