// SPDX-License-Identifier: Apache-2.0
// A sharded model: its forwards and backwards. It lets operators use parameters within them only,
// has the units gathered that they use (gathered_units.h), and averages gradients (gradients.h).
//
// The FullyShardedDataParallel owns it; units and nodes of libtorch's graph refer to it weakly.
// Thread-safe: libtorch runs backward on threads of its own. use() and take_gradients() block until
// a gather or a reduction has ended (CPU), or make the current stream wait for it (CUDA).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/shard/gathered_units.h>
#include <weft/engine/shard/gradients.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>

namespace weft::shard {

class JoinedSteps;

class ShardedModel : public std::enable_shared_from_this<ShardedModel> {
 public:
  static std::shared_ptr<ShardedModel> make(std::vector<std::shared_ptr<Unit>> units,
                                            std::size_t prefetch);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // Around the root's forward. `trains`: gradients are enabled, so a backward may follow.
  // begin_forward() throws Caller inside of an AutogradContext and of a backward. `divisor`: of the
  // gradients; 0: the number of ranks.
  void begin_forward(bool trains, int divisor);
  void end_forward();
  bool is_in_forward() const;

  // Forwards that begin meanwhile have backwards that average gradients, or keep them.
  bool is_synchronizing() const { return synchronizes_; }
  void set_synchronizing(bool on) { synchronizes_ = on; }

  // Called before an operator that reads these parameters: see install(). Throws Caller outside of
  // forward and backward.
  static void before_operator(const std::vector<Belongs>& used);
  static void after_change(const Belongs& parameter);

  // Throws Caller if the shards have changed since they had this version.
  static void require_version(const Unit& unit, std::uint64_t version);
  // Called by a unit's node: all gradients of these parameters are there. Null if the backward only
  // keeps them.
  std::shared_ptr<Reduction> take_gradients(Unit& unit, const std::vector<std::size_t>& parameters,
                                            bool synchronizes, std::vector<at::Tensor> gradients,
                                            std::vector<at::Tensor>& outputs);

  // True if the parameter is a shard of which no_sync() keeps a gradient.
  static bool keeps_gradient_of(const at::Tensor& parameter);
  // weft::join calls it before the first step. Throws Caller if no_sync() has kept gradients.
  void require_nothing_kept();

  static Error refused_context();

  GatheredUnits::Statistics statistics() const;

 private:
  friend class JoinedSteps;
  friend class MirroredSteps;  // does the same as use() and take_gradients() for other ranks' steps
  ShardedModel(std::vector<std::shared_ptr<Unit>> units, std::size_t prefetch);
  void begin_pass(bool trains) WEFT_REQUIRES(mutex_);
  // Called by each unit's node of a backward.
  void begin_backward() WEFT_REQUIRES(mutex_);
  // Inside of weft::join: throws Caller if the last averaging backward has failed.
  void require_no_failed_backward() const WEFT_REQUIRES(mutex_);
  // Drops what a failed backward has begun.
  void drop_failed() WEFT_REQUIRES(mutex_);
  void use(const std::vector<Belongs>& used);
  // Averages, at the end of the backward that runs, the gradients that no_sync() has kept of units
  // which that backward does not use.
  void average_rest_later() WEFT_REQUIRES(mutex_);
  void average_rest();
  // Called when an averaging backward has ended: frees the units that have no trained parameter.
  void end_use_of_frozen() WEFT_REQUIRES(mutex_);
  void forget_reductions() WEFT_REQUIRES(mutex_);

  const std::vector<std::shared_ptr<Unit>> units_;
  std::atomic<bool> synchronizes_{true};
  mutable Mutex mutex_;
  int forwards_ WEFT_GUARDED_BY(mutex_) = 0;       // nested calls of the root's forward
  bool trains_ WEFT_GUARDED_BY(mutex_) = false;    // the last forward
  bool captured_ WEFT_GUARDED_BY(mutex_) = false;  // the last forward, into a CUDA graph
  GatheredUnits gathered_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> versions_ WEFT_GUARDED_BY(mutex_);  // by unit: at the last forward
  GradientReducer reducer_ WEFT_GUARDED_BY(mutex_);
  struct Backwards {
    int last = -1;                       // libtorch's number of it
    bool averages = false;               // from the begin of one that averages until it succeeds
    bool averages_kept = false;          // and no_sync() had kept gradients
    std::weak_ptr<const int> running{};  // that one's number, until libtorch destroys it
  } backwards_ WEFT_GUARDED_BY(mutex_);
  JoinedSteps* joined_ WEFT_GUARDED_BY(mutex_) = nullptr;  // inside of weft::join
};

}  // namespace weft::shard
