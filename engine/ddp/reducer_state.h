// What the reducer knows of the passes that were: which parameters they used, how often, and in
// which order their gradients came. Internal to it, which locks.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::parallel {

// Which parameters had a gradient, here and anywhere.
class Usage {
 public:
  explicit Usage(std::size_t parameters);
  // Here, since the ranks last told each other.
  void note(std::size_t parameter);
  bool is_here(std::size_t parameter) const;
  void forget() { here_.zero_(); }
  // The ranks tell each other, as one all-reduce of the group.
  void share(ProcessGroup& group);
  Work take_work() { return std::exchange(work_, {}); }
  // Whether they ever have.
  bool is_shared() const { return sum_.defined(); }
  // As of the last share(), whose work has been waited for.
  bool is_anywhere(std::size_t parameter);

 private:
  at::Tensor here_;  // int32, 0 or 1
  at::Tensor sum_;   // over the ranks
  Work work_;
};

// How often each gradient comes. The first pass over a static graph counts, and all later ones must
// bring the same.
class StaticGraph {
 public:
  StaticGraph(bool enabled, std::size_t parameters) : enabled_(enabled), counts_(parameters) {}
  explicit operator bool() const { return enabled_; }
  // Whether this rank has counted. One that has only mirrored the first pass of the others has not.
  bool is_counted() const { return enabled_ && counted_; }
  bool counts() const { return enabled_ && !counted_; }
  // Whether the ranks have told each other what they use.
  bool is_shared() const { return shared_; }

  void count(std::size_t parameter) { ++counts_[parameter]; }
  bool uses(std::size_t parameter) const { return counts_[parameter] > 0; }
  std::vector<std::size_t> unused() const;
  void begin_pass() { remaining_ = counts_; }
  // A gradient has come; false if that is once too often.
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

// The order in which gradients come, in the first pass, on rank 0: the others take it over.
class ArrivalOrder {
 public:
  // Whether it is still to be shared.
  bool is_open() const { return !shared_; }
  void note(std::size_t parameter) { arrived_.push_back(parameter); }
  // Once, as a broadcast of the group. What has not come goes behind the rest.
  void share(ProcessGroup& group, std::size_t parameters);
  // Once, as soon as it is shared: waits for rank 0's.
  bool is_due() const { return order_.defined(); }
  std::vector<std::size_t> take();

 private:
  std::vector<std::size_t> arrived_;
  bool shared_ = false;
  at::Tensor order_;
  Work work_;
};

}  // namespace weft::parallel
