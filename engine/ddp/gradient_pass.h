// SPDX-License-Identifier: Apache-2.0
// One pass: the averaging of every parameter's gradient once, over one or several backwards of one
// forward. Decides when a bucket is launched, which parameters count as unused, and what becomes of
// the gradients at the end. Does not know which backward brings a gradient: the reducer does.
//
// The reducer owns it, and the reducer's mutex guards it. prepare(), compare_trained(), finish()
// and mirror() block on other ranks, the rest does not.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/ddp/ddp_options.h>
#include <weft/engine/ddp/device_groups.h>
#include <weft/engine/ddp/forwards.h>
#include <weft/engine/ddp/gradient_buckets.h>
#include <weft/engine/ddp/pass_failure.h>
#include <weft/engine/ddp/reducer_state.h>
#include <weft/engine/ddp/trained_parameters.h>
#include <weft/engine/ddp/unused_parameters.h>

namespace weft::parallel {

class GradientPass {
 public:
  // The arguments must outlive it.
  GradientPass(TrainedParameters& parameters, DeviceGroups& groups, GradientBuckets& buckets,
               Forwards& forwards, const DdpOptions& options);

  // True from begin() until all gradients have been averaged.
  bool is_open() const { return open_; }
  // True if later backwards belong to another wrapper of the model.
  bool has_failed() const { return open_ && failure_.has_failed(); }
  PassFailure& failure() { return failure_; }
  // Throws Caller, beginning with `call`, if a backward runs or has failed.
  void require_none(const std::string& call) const;
  const StaticGraph& static_graph() const { return static_graph_; }
  Usage& usage() { return unused_.usage(); }
  BucketFollower* follower() const { return follower_; }
  void set_follower(BucketFollower* follower) { follower_ = follower; }
  DdpStats stats() const;  // on any thread, without the reducer's mutex

  // Before a forward that synchronises; `is_reducing`: the last backward has begun to reduce
  // gradients. Rebuilds the buckets once. Throws Caller if the last pass has not ended, or cannot
  // be followed by another.
  void prepare(bool is_reducing);
  // Collective; Reducer::take_over_trained().
  void compare_trained();
  // Forgets the pass of an AutogradContext that has failed and so never reached finish(). The next
  // backward of the user's retained graph is another pass. Returns true if there was one.
  bool drop_failed();

  // A backward begins that is not known yet; `is_reducing`: one before it reduces gradients.
  void enter_backward(bool is_reducing);
  // Begins, unless it is open and this thread's backward may go on with it.
  void begin();
  // Fills the slots of parameters that are known to be unused.
  void fill_unused();
  // Adds the gradient that the parameter has now. Launches the buckets that are full.
  void take(std::size_t parameter);
  // The backward has run to its end. Averages the gradients, unless some have to come in another
  // backward.
  void finish();
  // Reducer::mirror_pass().
  void mirror();

  // The trained parameters whose gradients have not come.
  std::vector<std::size_t> missing() const;
  // True if gradients are missing at the end of the reducer, and the user does not know.
  bool is_left_unfinished() const {
    return open_ && !failure_.has_failed() && !told_unfinished_ && taken_ > 0;
  }

 private:
  Error unfinished();
  void fill(std::size_t parameter);
  void launch_full();
  void fill_counted();
  void take_over_order();
  void warn_of_rest();
  void note_buckets(bool rebuilt, std::chrono::nanoseconds waited = {});

  TrainedParameters& parameters_;
  DeviceGroups& groups_;
  GradientBuckets& buckets_;
  Forwards& forwards_;
  BucketFollower* follower_ = nullptr;
  UnusedParameters unused_;
  StaticGraph static_graph_;
  ArrivalOrder order_;
  mutable Mutex stats_mutex_;
  DdpStats stats_ WEFT_GUARDED_BY(stats_mutex_);
  PassFailure failure_;
  bool open_ = false;
  bool goes_on_ = false;          // it began in an earlier backward
  bool told_unfinished_ = false;  // the user has been told that gradients are missing
  std::size_t taken_ = 0;         // number of its gradients
};

}  // namespace weft::parallel
