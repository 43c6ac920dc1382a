// SPDX-License-Identifier: Apache-2.0
// The reducer's record of past passes: which parameters they used, how often, and in which order
// their gradients came. Internal to the reducer, whose mutex guards it. ArrivalOrder::take() blocks
// until rank 0's order has come; nothing else blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/ddp_options.h>
#include <weft/engine/ddp/trained_parameters.h>
#include <weft/engine/group/process_group.h>

namespace weft::parallel {

// Which parameters had a gradient, on this rank and on any rank.
class Usage {
 public:
  explicit Usage(std::size_t parameters);
  // Notes that this rank has used the parameter since the ranks last told each other.
  void note(std::size_t parameter);
  bool is_here(std::size_t parameter) const;
  void forget() { here_.zero_(); }
  // Tells the other ranks, by one all-reduce of the group.
  void share(ProcessGroup& group);
  Work take_work() { return std::exchange(work_, {}); }
  // True once share() has been called.
  bool is_shared() const { return sum_.defined(); }
  // As of the last share(); its work must have been waited for.
  bool is_anywhere(std::size_t parameter);

 private:
  at::Tensor here_;  // int32, 0 or 1
  at::Tensor sum_;   // over the ranks
  Work work_;
};

// Properties of the graph: whether it may leave parameters unused and, if it is static, how
// often each gradient comes. The first pass over a static graph counts; all later ones must bring
// the same gradients equally often.
class StaticGraph {
 public:
  // `parameters` must outlive it.
  StaticGraph(const DdpOptions& options, const TrainedParameters& parameters)
      : parameters_(parameters),
        enabled_(options.static_graph),
        may_leave_unused_(options.find_unused_parameters),
        counts_(parameters.size()) {}
  explicit operator bool() const { return enabled_; }
  // True if the next pass may leave parameters unused, so that they have to be found.
  bool finds_unused() const { return may_leave_unused_ && !is_counted(); }
  // True if the ranks tell each other in the next pass which parameters they use. A static graph is
  // counted once; without one, every pass may use other parameters.
  bool counts_usage() const { return enabled_ ? !shared_ : may_leave_unused_; }
  // True if this rank has counted. A rank that only mirrored the others' first pass has not.
  bool is_counted() const { return enabled_ && counted_; }
  bool counts() const { return enabled_ && !counted_; }

  void count(std::size_t parameter) { ++counts_[parameter]; }
  bool uses(std::size_t parameter) const { return counts_[parameter] > 0; }
  std::vector<std::size_t> unused() const;
  void begin_pass() { remaining_ = counts_; }
  // Called when a gradient has come. Throws Caller if it came more often than in the first pass.
  void take(std::size_t parameter);
  bool misses(std::size_t parameter) const { return remaining_[parameter] > 0; }
  void end_pass() { counted_ = shared_ = true; }
  void mirror_pass() { shared_ = true; }
  void drop_pass();
  // Called once this rank has counted. If it only mirrored the pass in which the others counted,
  // they do not know the parameters that it alone uses: they would leave these without a gradient
  // for good, and only this rank would step them. Returns the error that says so, if there is one.
  std::optional<Error> unknown_to_others(Usage& usage) const;

 private:
  const TrainedParameters& parameters_;
  const bool enabled_;
  const bool may_leave_unused_;
  bool counted_ = false;
  bool shared_ = false;  // the ranks have told each other which parameters they use
  std::vector<int> counts_;
  std::vector<int> remaining_;  // in this pass
};

// The order in which gradients came in rank 0's first pass; the other ranks take it over.
class ArrivalOrder {
 public:
  // `enabled`: the buckets follow that order. No order is shared otherwise.
  explicit ArrivalOrder(bool enabled) : enabled_(enabled) {}
  // True until the order is shared.
  bool is_open() const { return enabled_ && !shared_; }
  // True until take().
  bool is_ahead() const { return enabled_ && !taken_; }
  void note(std::size_t parameter) { arrived_.push_back(parameter); }
  // Called at the end of each pass; does nothing after the first one. Broadcasts rank 0's order;
  // parameters whose gradient has not come are put at the end.
  void share(ProcessGroup& group, std::size_t parameters);
  // True from share() until take().
  bool is_due() const { return order_.defined(); }
  // Waits for rank 0's order and returns it.
  std::vector<std::size_t> take();

 private:
  const bool enabled_;
  std::vector<std::size_t> arrived_;
  bool shared_ = false;
  bool taken_ = false;
  at::Tensor order_;
  Work work_;
};

}  // namespace weft::parallel
