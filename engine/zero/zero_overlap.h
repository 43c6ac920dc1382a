// The part of ZeroRedundancyOptimizer that steps while the model's backward computes. Internal to
// it.
//
// In line among the group's operations stand, of bucket after bucket, its all-reduce and then the
// broadcasts of the shards that the bucket before it has completed: so the line moves while an
// owner steps. A broadcast is issued before its owner has stepped, in the same place on all ranks,
// and begins when it has (host memory: a flag; CUDA: stream order). Its step waits only for
// all-reduces that stand before it, so the line always moves on.
#pragma once

#include <exception>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <weft/engine/ddp/reducer.h>
#include <weft/engine/zero/zero.h>

namespace weft::parallel {

// Of the error that other ranks see.
constexpr const char* kStepThrew = "ZeroRedundancyOptimizer: the step there threw: ";

// What went wrong first. Usable from every thread.
class Failure {
 public:
  explicit Failure(std::weak_ptr<group::Core> group) : group_(std::move(group)) {}
  // Ends the group, if it is the first: the other ranks wait for values that do not come. `what`
  // happened here, they are told.
  void set(const char* what, const std::exception_ptr& why);
  // The first, once the others have been told.
  [[noreturn]] void rethrow() const;
  std::exception_ptr why() const;

 private:
  const std::weak_ptr<group::Core> group_;  // a step under way does not keep a rank from leaving
  mutable std::mutex mutex_;
  std::exception_ptr why_;
  HostFlag told_;
};

// Called by the backward of the model under the reducer's lock, and by the optimizer's own calls
// outside of a backward.
struct ShardedOptimizer::Overlap final : BucketFollower {
  Overlap(ShardedOptimizer& zero, const std::shared_ptr<Reducer>& reducer);
  ~Overlap() override;

  void before_forward() override;
  void on_bucket(const std::vector<at::Tensor>& parameters, const Future<void>& averaged,
                 bool is_last) override;
  [[noreturn]] void fail(const std::exception_ptr& why) override;

  // Ends what backward has begun: waits for all of it, throws the first error. By shard, whether it
  // has been stepped and has arrived; empty where no backward has stepped since.
  std::vector<bool> complete();
  bool is_under_way() const { return pass_.has_value(); }

 private:
  // A shard that has been stepped, or will be once its averages are there.
  struct Stepped {
    const Shard* shard = nullptr;
    at::Tensor flat;  // what travels; kept until the current stream has waited for it
    Future<void> ready;
    std::shared_ptr<HostFlag>
        flag;  // host memory, on its owner: raised when `flat` has the new values
  };
  // A backward, until complete().
  struct Pass {
    bool all_came = false;             // the last bucket has been issued
    std::vector<std::size_t> missing;  // by shard: parameters whose averages nobody brings yet
    std::vector<std::vector<Future<void>>> needs;  // by shard: the buckets of its parameters
    std::vector<bool> begun;                       // by shard
    std::vector<Stepped> stepped;
    std::size_t sent = 0;  // of those
    Future<void> last;     // host memory: the step before
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
