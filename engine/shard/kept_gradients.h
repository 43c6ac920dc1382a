// SPDX-License-Identifier: Apache-2.0
// Whole gradients that backwards inside of no_sync() have kept, until a backward averages them.
//
// zero_grad() drops them, as it does with DistributedDataParallel, where they are the parameters'
// .grad. Here .grad has a shard's shape. A shard whose whole gradient is kept has a .grad all the
// same: zeros in place of an undefined one. If that is not as it was at the next forward or
// backward, the program has dropped what it stands for.
//
// The model's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/unit.h>

namespace weft::shard {

// The dtype in which gradients of the parameter are added and reduced.
at::ScalarType reduced_in(const Unit& unit, const UnitParameter& parameter);

class KeptGradients {
 public:
  explicit KeptGradients(std::size_t units) : units_(units) {}

  // Keeps the gradients of these parameters, by slot, added to those that it keeps already.
  void add(const Unit& unit, const std::vector<std::size_t>& parameters,
           std::vector<at::Tensor>& gradients);
  // True from add() until the unit's gradients are taken or dropped, alike on all ranks.
  bool has(const Unit& unit) const { return !units_[unit.index].empty(); }
  bool has_any() const;
  // True if it keeps the parameter's gradient and drop_zeroed() would not drop that.
  bool keeps(const Unit& unit, std::size_t parameter) const;
  // Adds what it keeps of the unit to these gradients, and keeps nothing of it any more.
  void take(const Unit& unit, const std::vector<std::size_t>& parameters,
            std::vector<at::Tensor>& gradients);

  // Drops the gradients of parameters whose shards' .grad was reset, replaced or written.
  void drop_zeroed();
  void drop_all();
  // Throws Caller if a parameter with a kept gradient requires none now, which no backward would
  // average.
  void require_trained(const std::vector<std::shared_ptr<Unit>>& units) const;

 private:
  struct Kept {
    at::Tensor sum;  // undefined if no backward of this rank has brought a gradient
    at::Tensor shard;
    at::Tensor gradient;  // the shard's .grad, and its version
    std::uint32_t version = 0;
  };
  static Kept kept_for(at::Tensor shard);
  static bool is_untouched(const Kept& kept);
  // Ends what kept_for() has begun.
  static void let_go(const Kept& kept);

  std::vector<std::map<std::size_t, Kept>> units_;  // by unit, and by parameter
};

}  // namespace weft::shard
