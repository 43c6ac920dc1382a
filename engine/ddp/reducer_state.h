// The reducer's record of past passes: which parameters they used, how often, and in which order
// their gradients came. Internal to the reducer, whose mutex guards it.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

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

// How often each gradient comes. The first pass over a static graph counts; all later ones must
// bring the same gradients equally often.
class StaticGraph {
 public:
  StaticGraph(bool enabled, std::size_t parameters) : enabled_(enabled), counts_(parameters) {}
  explicit operator bool() const { return enabled_; }
  // True if this rank has counted. A rank that only mirrored the others' first pass has not.
  bool is_counted() const { return enabled_ && counted_; }
  bool counts() const { return enabled_ && !counted_; }
  // True once the ranks have told each other which parameters they use.
  bool is_shared() const { return shared_; }

  void count(std::size_t parameter) { ++counts_[parameter]; }
  bool uses(std::size_t parameter) const { return counts_[parameter] > 0; }
  std::vector<std::size_t> unused() const;
  void begin_pass() { remaining_ = counts_; }
  // Called when a gradient has come; false if it came more often than in the first pass.
  bool take(std::size_t parameter) { return uses(parameter) && --remaining_[parameter] >= 0; }
  bool misses(std::size_t parameter) const { return remaining_[parameter] > 0; }
  void end_pass() { counted_ = shared_ = true; }
  void mirror_pass() { shared_ = true; }
  void drop_pass();

 private:
  const bool enabled_;
  bool counted_ = false;
  bool shared_ = false;
  std::vector<int> counts_;
  std::vector<int> remaining_;  // in this pass
};

// The order in which gradients came in rank 0's first pass; the other ranks take it over.
class ArrivalOrder {
 public:
  // True until the order is shared.
  bool is_open() const { return !shared_; }
  void note(std::size_t parameter) { arrived_.push_back(parameter); }
  // Called once. Broadcasts rank 0's order; parameters whose gradient has not come are put at the
  // end.
  void share(ProcessGroup& group, std::size_t parameters);
  // True from share() until take().
  bool is_due() const { return order_.defined(); }
  // Waits for rank 0's order and returns it.
  std::vector<std::size_t> take();

 private:
  std::vector<std::size_t> arrived_;
  bool shared_ = false;
  at::Tensor order_;
  Work work_;
};

}  // namespace weft::parallel
