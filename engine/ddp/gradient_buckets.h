// SPDX-License-Identifier: Apache-2.0
// The buckets in which gradients travel: their memory, and the collectives that reduce them. Knows
// the parameters, not which backward brings their gradients: the reducer says when a pass begins,
// and brings one gradient after the other.
//
// The reducer owns it, and the reducer's mutex guards it. collect() blocks until the sums have come
// (CUDA: the current stream waits), launch_next() only if this rank has frozen parameters since its
// forward; nothing else blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/ddp/ddp_options.h>
#include <weft/engine/ddp/device_groups.h>
#include <weft/engine/ddp/trained_parameters.h>
#include <weft/engine/future/future.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/sparse_sum.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

// Uses the averages while backward computes the next gradients (ZeroRedundancyOptimizer). The
// reducer does not own it.
class BucketFollower {
 public:
  BucketFollower() = default;
  BucketFollower(const BucketFollower&) = delete;
  BucketFollower& operator=(const BucketFollower&) = delete;
  virtual ~BucketFollower() = default;
  // Called before a forward with gradients, after the previous backward has ended.
  virtual void before_forward() = 0;
  // Called for every bucket, in the order of the buckets, on the thread of backward, when the
  // bucket's collective has been issued: so operations that it issues have the same place among the
  // group's operations on all ranks. When `averaged` is done, the averages are in the gradients of
  // `parameters` (CUDA: for streams that wait for it). The bucket of a sparse gradient has no
  // `parameters`.
  virtual void on_bucket(const std::vector<at::Tensor>& parameters, const Future<void>& averaged,
                         bool is_last) = 0;
  // The backward ends with the error `why`. Throws it, or an earlier error of its own that has
  // caused it. If it has begun to follow this pass, it tells the other ranks.
  [[noreturn]] virtual void fail(const std::exception_ptr& why) = 0;
};

// Makes the current stream of that device wait for the work enqueued on `stream` so far.
void wait_for(const c10::Stream& stream);
// Waits for a collective of this thread's backward. A distributed pass has a deadline, which also
// limits waits for the other ranks.
void wait_in_backward(Work work, const c10::Device& device);

// One bucket and the pass that fills it.
struct GradientBucket {
  std::vector<std::size_t> parameters;
  bool sparse = false;
  at::Tensor flat;
  std::vector<at::Tensor> views;  // of flat, shaped and strided as the parameters
  std::size_t pending = 0;
  std::vector<c10::Stream> streams;      // CUDA: on which this pass has filled slots
  Future<at::Tensor> reduced;            // returned by the hook
  Work work;                             // of the built-in all-reduce
  std::optional<Future<void>> averaged;  // with a follower: done when gradients are averages
  at::Tensor sparse_gradient;
  group::SparseSum sparse_sum;
  std::vector<trace::Arrow> arrows;  // from the gradients that have come

  // Notes the current stream of the device. Autograd computes each gradient on the stream of its
  // forward operation, and a user may use several streams.
  void note_stream(const c10::Device& device);
  // Makes the current stream wait for those that have been noted, and forgets them.
  void wait_for_slots();
  // Forgets a pass that has failed.
  void drop_pass();
};

class GradientBuckets {
 public:
  // `model`: its number in transport::Training. The arguments must outlive the buckets.
  GradientBuckets(TrainedParameters& parameters, DeviceGroups& groups, std::uint32_t model,
                  const DdpOptions& options);

  // Plans the buckets in that order of all parameters; they hold those that are or have been
  // trained. Not during a pass.
  void build(const std::vector<std::size_t>& order);
  // The same in the order of the last build().
  void rebuild() { build(std::vector<std::size_t>(order_)); }
  // True if the parameter has a place in a bucket. It has none if it was never trained.
  bool hold(std::size_t parameter) const { return places_[parameter].has_value(); }
  // Of the buckets of dense gradients, in launch order.
  std::vector<std::size_t> bytes() const;

  // The number by which gradients are divided if there is no hook.
  void set_divisor(int ranks) { divisor_ = ranks; }
  bool has_hook() const { return static_cast<bool>(hook_); }
  void set_hook(CommHook hook) { hook_ = std::move(hook); }

  void begin_pass();
  // True if fill() was called for the parameter in this pass, or in the last one if none has begun.
  bool is_filled(std::size_t parameter) const { return filled_[parameter]; }
  // Puts the parameter's gradient, or zeros if it is undefined, into its slot. Returns true if
  // the bucket is full now. Throws Caller if the slot has been filled in this pass.
  bool fill(std::size_t parameter);
  // Buckets are launched in their order, so that it is the same on all ranks.
  bool is_next_full() const { return !are_all_launched() && buckets_[next_].pending == 0; }
  bool is_any_launched() const { return next_ > 0; }
  bool are_all_launched() const { return next_ == buckets_.size(); }
  // Issues the next bucket's collective, which carries the number `step`, or calls the hook. If
  // `compares`, calls TrainedParameters::compare_changes() before.
  void launch_next(std::uint32_t step, bool compares);
  // For the bucket that was launched last: writes its averages into the gradients when they come,
  // as a continuation of its collective, and not in collect() (CUDA: on another stream). Calls
  // `follower`, with the bucket's parameters for which `is_used` is true.
  void follow(BucketFollower& follower, const std::function<bool(std::size_t)>& is_used);
  // Begins a pass in which this rank has no gradients: launches all buckets with zeros.
  void launch_zeros(std::uint32_t step, bool compares);
  // Waits for all buckets and writes the averages into the gradients.
  void collect();
  // Forgets a pass that has failed.
  void drop_pass();

 private:
  struct SlotIndex {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };

  void fill_slot(GradientBucket& bucket, std::size_t slot, std::size_t parameter);
  void launch_sparse(GradientBucket& bucket, std::size_t index);
  void collect(GradientBucket& bucket, std::size_t index);
  void collect_sparse(GradientBucket& bucket, std::size_t index);
  bool gradients_are_views() const;

  TrainedParameters& parameters_;
  DeviceGroups& groups_;  // `of(device)` carries buckets
  const std::uint32_t model_;
  const DdpOptions& options_;
  std::vector<std::size_t> order_;
  std::vector<GradientBucket> buckets_;
  std::vector<std::optional<SlotIndex>> places_;  // by parameter
  std::vector<bool> filled_;                      // by parameter
  std::size_t next_ = 0;                          // the first bucket that has not been launched
  CommHook hook_;
  int divisor_;
};

}  // namespace weft::parallel
