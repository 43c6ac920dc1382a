// SPDX-License-Identifier: Apache-2.0
// The part of ZeroRedundancyOptimizer that steps while the model's backward computes. Internal to
// it. Reducer::set_follower() (engine/ddp) refuses some calls of overlap_with() as well.
//
// In the order of the group's operations, each bucket's all-reduce is followed by the broadcasts of
// the shards that the bucket before it has completed, so operations go on while an owner steps. A
// broadcast is issued before its owner has stepped, in the same place on all ranks, and begins when
// the owner has stepped (host memory: by a flag; CUDA: by stream order). A step waits only for
// all-reduces that were issued before its broadcast, so there is no deadlock.
#pragma once

#include <exception>
#include <optional>
#include <unordered_map>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>
#include <weft/engine/zero/zero.h>

namespace weft::parallel {

// Begins the error that other ranks see.
constexpr const char* kStepThrew = "ZeroRedundancyOptimizer: the step there threw: ";

// The first error of a pass. Thread-safe.
class Failure {
 public:
  explicit Failure(const ProcessGroup& group) : group_(group) {}
  // Stores the error if it is the first, and then ends the group, because the other ranks wait for
  // values that will not come. They are told `what` and this rank's error.
  void set(const char* what, const std::exception_ptr& why);
  // Throws the first error, once the other ranks have been told.
  [[noreturn]] void rethrow() const;
  std::exception_ptr why() const;

 private:
  const group::WeakGroup group_;  // weak: a step must not keep a rank from leaving
  mutable Mutex mutex_;
  std::exception_ptr why_ WEFT_GUARDED_BY(mutex_);
  HostFlag told_;
};

// The model's backward calls it under the reducer's lock; the optimizer's own functions call it
// outside of backwards.
struct ShardedOptimizer::Overlap final : BucketFollower {
  Overlap(ShardedOptimizer& zero, const std::shared_ptr<Reducer>& reducer);
  ~Overlap() override;

  void before_forward() override;
  void on_bucket(const std::vector<at::Tensor>& parameters, const Future<void>& averaged,
                 bool is_last) override;
  [[noreturn]] void fail(const std::exception_ptr& why) override;

  // Waits for everything that backward has begun and throws the first error. Returns for each shard
  // whether it has been stepped and has arrived; empty if no backward has stepped since the last
  // call.
  std::vector<bool> complete();
  bool is_under_way() const { return pass_.has_value(); }

 private:
  // A shard that has been stepped, or will be once its averages have arrived.
  struct Stepped {
    const Shard* shard = nullptr;
    at::Tensor flat;  // the bytes to send; kept until the current stream has waited
    Future<void> ready;
    std::shared_ptr<HostFlag> flag;  // host memory, on the owner: raised when `flat` is up to date
  };
  // A backward and its steps, until complete().
  struct Pass {
    bool all_came = false;             // the last bucket has been issued
    std::vector<std::size_t> missing;  // by shard: parameters whose averages have not been issued
    std::vector<std::vector<Future<void>>> needs;  // by shard: the buckets of its parameters
    std::vector<bool> begun;                       // by shard
    std::vector<Stepped> stepped;
    std::size_t sent = 0;  // how many of `stepped`
    Future<void> last;     // host memory: the previous step
    std::vector<Future<void>> arrivals;
    std::shared_ptr<Failure> failure;  // shared with steps under way
  };
  Pass begin();
  void step(std::size_t shard);
  void send(const Stepped& one);

  ShardedOptimizer& zero_;
  std::weak_ptr<Reducer> reducer_;
  std::unordered_map<const void*, std::size_t> shard_of_;  // by parameter
  std::optional<Pass> pass_;
};

}  // namespace weft::parallel
