// SPDX-License-Identifier: Apache-2.0
// Gathers and frees the units of a sharded model. A unit is gathered when an operator
// first uses one of its parameters, and freed when an operator uses another unit, or all of its
// gradients have come. The units that are used next are gathered ahead, in the order that the pass
// before has recorded.
//
// The sharded model owns it, and its mutex guards it. gather() blocks until the gathers have ended
// (CPU), or makes the current stream wait for them (CUDA).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <weft/engine/shard/gather_order.h>
#include <weft/engine/shard/unit.h>

namespace weft::shard {

class GatheredUnits {
 public:
  // Each has an order of its own. Evaluation: a forward without gradients.
  enum class Pass { Forward, Evaluation, Backward };

  GatheredUnits(std::vector<std::shared_ptr<Unit>> units, std::size_t prefetch);

  // Called before each gather of a unit; empty: nothing is called.
  void set_before_gather(std::function<void(const Unit&)> call) {
    before_gather_ = std::move(call);
  }

  // A forward begins, and behind Pass::Forward its backward: frees all units.
  void begin(Pass forward);
  // Starts to gather the units that the pass is going to use first.
  void start_ahead(Pass pass);
  // The forward has ended. If a backward follows, the units that it uses first, which the forward
  // used last, stay gathered; otherwise frees all units.
  void end_forward(bool has_backward);
  // True until the first gather() of a pass.
  bool begins() const { return begins_; }
  // True if nothing is to be done before an operator uses these units. Never true for the first use
  // of a pass, which its order notes.
  bool are_ready(const std::vector<std::size_t>& used) const;
  // Gathers the units that an operator uses, and frees those that it does not need any more.
  void gather(const std::vector<std::size_t>& used, Pass pass);
  // All gradients of the unit have come.
  void end_use(std::size_t unit);
  // Frees all units.
  void drop();

  // True once a pass has recorded its order.
  bool is_recorded(Pass pass) const { return orders_[index_of(pass)].is_recorded(); }
  // The next pass of each kind records its order anew.
  void forget_orders();

  struct Statistics {
    std::size_t gathers = 0, ahead = 0;  // `ahead`: of them, before their use
    std::size_t most_bytes = 0;          // gathered at one time
  };
  const Statistics& statistics() const { return statistics_; }

 private:
  static std::size_t index_of(Pass pass) { return static_cast<std::size_t>(pass); }
  void note_order(GatherOrder& order, const std::vector<std::size_t>& used);
  // Adds to the units that a forward needs those that its backward uses first, up to `most` in all:
  // one that the forward has gathered is not gathered again.
  void add_begin_of_backward(std::vector<std::size_t>& needed, std::size_t most) const;
  // Starts to gather the units that come after `used`.
  void start_ahead(const GatherOrder& order, const std::vector<std::size_t>& used);
  void start_gather(Unit& unit, bool is_ahead);
  void free_unless(const std::vector<std::size_t>& needed);

  const std::vector<std::shared_ptr<Unit>> units_;
  const std::size_t prefetch_;
  std::function<void(const Unit&)> before_gather_;
  bool begins_ = true;                // the next use is the first of its pass
  GatherOrder orders_[3];             // by pass
  bool has_told_ = false;             // of a change of order
  std::vector<std::size_t> present_;  // the units that the last operator has used
  std::vector<bool> kept_;            // by unit: it stays gathered until its gradients come
  Statistics statistics_;
};

}  // namespace weft::shard
