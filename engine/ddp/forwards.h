// SPDX-License-Identifier: Apache-2.0
// The forwards that a DistributedDataParallel has made, as the reducer knows them: those that a
// backward may still reach, and how many of them were steps.
//
// The reducer owns it, and the reducer's mutex guards it. Nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace weft::parallel {

// The record of one forward with gradients. Its outputs hold it, so it lives as long as a backward
// may reach it.
struct Forward {
  bool synchronizes = false;
  bool had_backward = false;
  bool counts = false;  // as a step
  // With find_unused_parameters: the parameters that the outputs do not depend on.
  std::vector<std::size_t> unused;
};

class Forwards {
 public:
  // True if forwards that begin now are to synchronise (false inside of no_sync).
  bool are_synchronizing() const { return synchronizing_; }
  void set_synchronizing(bool on) { synchronizing_ = on; }

  // Adds a forward whose outputs hold the record.
  void add(const std::shared_ptr<Forward>& forward);
  // Adds a forward that returned nothing, or a type in which no tensors are found, so any backward
  // may belong to it.
  void add_hidden();
  // True since a forward without visible outputs; forgotten at the forward after the next pass.
  bool have_hidden() const { return hidden_.has_value(); }
  // The same, if one of these forwards synchronises.
  bool have_synchronizing_hidden() const { return hidden_.value_or(false); }
  // Called when a pass has averaged the gradients.
  void end_pass() { hidden_had_pass_ = true; }

  // True if a forward that synchronises has had no backward: it may keep a loss elsewhere.
  bool await_backward() const;
  // The parameters, of that many, that no live forward uses. One backward may run for the sum of
  // the losses of several forwards. A parameter that is used only by forwards outside of this
  // backward is counted as unused at its end. Empty if a forward has no visible outputs.
  std::vector<std::size_t> unused(std::size_t parameters) const;

  // How many forwards were steps. The ranks' steps are compared with each bucket: a rank that has
  // skipped the backward of a step has made one forward more than the others.
  std::uint32_t steps() const { return steps_; }
  // Counts or uncounts `forward` as a step. Forwards for torch::autograd::grad() and for evaluation
  // are not counted, since one rank may make them alone.
  void count(Forward& forward, bool counts);
  // Counts a step of which no forward is known here.
  void count_hidden() { ++steps_; }

 private:
  void forget_former();

  std::vector<std::weak_ptr<Forward>> forwards_;
  std::uint32_t steps_ = 0;
  std::optional<bool> hidden_;    // a forward without visible outputs; true if one synchronises
  bool hidden_had_pass_ = false;  // since that forward
  bool synchronizing_ = true;
};

}  // namespace weft::parallel
