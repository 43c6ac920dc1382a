// SPDX-License-Identifier: Apache-2.0
// Averages gradients over the ranks while the backward pass still computes the next ones. Internal
// to DistributedDataParallel: knows parameters and buckets, not modules.
//
// A forward calls begin_forward, then prepare_forward unless it is inside of no_sync, then the
// user's forward, then end_forward(outputs). The outputs hold a record of their forward. When a
// backward reaches an output, on_backward_start gets that record, which decides whether the
// backward synchronises; other forwards and backwards in between do not matter.
//
// A pass reduces every parameter's gradient once. Each gradient accumulator calls on_gradient when
// its gradient has been computed. The last gradient of a bucket launches the bucket's all-reduce at
// once, from that thread, in the order of the buckets, which is the same on all ranks. When the
// backward ends, end_backward() makes the current stream (CPU: this thread) wait for the sums and
// writes the averages into the gradients. If an average is already in a gradient, a local gradient
// added to it averages to the old average plus the average of the local gradients; so each of
// several backwards may have its own pass.
//
// The reducer decides whether a backward averages gradients; its parts do the work under its mutex.
// TrainedParameters and GradientBuckets know nothing of passes, GradientPass runs one over both,
// Forwards and RunningBackward know which forwards and backwards there are.
//
// DistributedDataParallel owns it; each of its outputs and gradient accumulators knows it weakly.
// Thread-safe against autograd's threads. The user calls forward and backward one after the other.
// prepare_forward(), take_over_trained(), mirror_pass() and the end of a backward block on other
// ranks.
//
// It has 26 functions, because the wrapper, join and the optimizers that step in the backward each
// set what the next backward does, and autograd's threads read that under the same mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/mutex.h>
#include <weft/engine/ddp/accumulator_hooks.h>
#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/ddp/ddp_options.h>
#include <weft/engine/ddp/device_groups.h>
#include <weft/engine/ddp/forwards.h>
#include <weft/engine/ddp/gradient_buckets.h>
#include <weft/engine/ddp/gradient_pass.h>
#include <weft/engine/ddp/other_wrappers.h>
#include <weft/engine/ddp/parameter_check.h>
#include <weft/engine/ddp/running_backward.h>
#include <weft/engine/ddp/trained_parameters.h>

namespace weft::parallel {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `number`: this model in transport::Training.
  static std::shared_ptr<Reducer> make(std::vector<ReducerParameter> parameters,
                                       DeviceGroups groups, std::uint32_t number,
                                       const DdpOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Called before every forward with gradients, also one whose backward will not synchronise.
  void begin_forward();
  // Called before a forward whose backward will synchronise. Rebuilds the buckets once, after the
  // first synchronised backward. Throws Caller, naming the parameters, if the last backward left
  // gradients out or a parameter's type or device has changed.
  void prepare_forward();
  // Called after a forward with the tensors that it returned. A backward of one of them first calls
  // on_backward_start. `trains`: the module is in training mode.
  void end_forward(const std::vector<at::Tensor>& outputs, bool trains);
  // True if forwards that begin now are to synchronise (false inside of no_sync). While it is
  // false, the user wants gradients without a forward of the wrapper, so they cause no warning.
  bool is_synchronizing() const;
  void set_synchronizing(bool on);
  // True if any parameter requires a gradient and they are not those of the last forward that
  // synchronised.
  bool trains_others() const;
  // Collective. Called before a forward that synchronises: notes which parameters require a
  // gradient now. A parameter that requires one for the first time gets a place in the buckets.
  // Throws Caller, naming the parameters, if the ranks differ in that or if the buckets cannot
  // change any more.
  void take_over_trained();
  void set_comm_hook(CommHook hook);
  // Null removes it. Not during a backward.
  void set_follower(BucketFollower* follower);
  bool has_follower() const;
  // The number by which gradients are divided: the number of ranks, unless join sets another.
  void set_divisor(int ranks);
  // Takes part in one pass of the others with zeros; called by a rank that has run out of inputs.
  // Its parameters receive the same gradients as the others', for an optimizer that goes on here
  // (ZeroRedundancyOptimizer).
  void mirror_pass();

  DdpStats stats() const;
  // The parameters whose gradients are averaged. For the follower, which calls it under the
  // reducer's lock or outside of backwards.
  std::vector<at::Tensor> averaged_parameters() const;
  const ProcessGroup& group() const { return groups_.own(); }

 private:
  using Kind = RunningBackward::Kind;

  Reducer(std::vector<ReducerParameter> parameters, DeviceGroups groups, std::uint32_t number,
          const DdpOptions& options);
  void on_backward_start(Forward& forward);
  void on_gradient(std::size_t parameter);
  void enter_backward() WEFT_REQUIRES(mutex_);
  void keep_local(std::size_t parameter) WEFT_REQUIRES(mutex_);
  void synchronize() WEFT_REQUIRES(mutex_);
  void follow_parameters() WEFT_REQUIRES(mutex_);
  void end_backward();
  void refuse_within_hook(const char* call) const;

  DeviceGroups groups_;  // `of(device)` carries buckets, `own()` everything else
  const DdpOptions options_;

  std::atomic<std::thread::id> hook_thread_{};  // runs the communication hook

  mutable Mutex mutex_;
  TrainedParameters parameters_ WEFT_GUARDED_BY(mutex_);
  AccumulatorHooks hooks_ WEFT_GUARDED_BY(mutex_);
  OtherWrappers others_;  // thread-safe
  GradientBuckets buckets_ WEFT_GUARDED_BY(mutex_);
  Forwards forwards_ WEFT_GUARDED_BY(mutex_);
  RunningBackward backward_ WEFT_GUARDED_BY(mutex_);
  GradientPass pass_ WEFT_GUARDED_BY(mutex_);
  ParameterCheck check_ WEFT_GUARDED_BY(mutex_);
  bool warned_of_direct_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::parallel
