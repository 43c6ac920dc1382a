// SPDX-License-Identifier: Apache-2.0
// The order in which units are used. The first pass records it; later passes predict from it which
// units come next. A pass that differs from the record replaces it.
//
// The sharded model owns it, and its mutex guards it. Nothing here blocks.
#pragma once

#include <cstddef>
#include <vector>

namespace weft::shard {

class GatherOrder {
 public:
  // A pass begins, and the one before has ended. A pass that used no unit counts as none.
  void begin();
  // Notes that the pass uses `unit` now. Returns false if the record had another one there.
  bool step(std::size_t unit);
  // At most `count` units that come next, nearest first, without repetition and without the one
  // that is used now. Empty during the first pass.
  std::vector<std::size_t> next(std::size_t count) const;
  // True after a pass.
  bool is_recorded() const { return !recorded_.empty() || !present_.empty(); }

 private:
  std::vector<std::size_t> recorded_, present_;
  std::size_t position_ = 0;  // in recorded_, of the unit that is to come
  bool differs_ = false;
};

}  // namespace weft::shard
