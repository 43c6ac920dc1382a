// SPDX-License-Identifier: Apache-2.0
// Finds the rows of a part's values that this rank has. A sharded model (engine/shard/) and its
// optimizer have some; files hold the values whole, in slices of any ranks. Internal.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/shard/rows.h>

namespace weft::checkpoint {

struct Value;

struct OwnRows {
  shard::Rows rows;                 // of dimension 0
  std::vector<std::int64_t> sizes;  // of the whole
  c10::ScalarType dtype{};
  // The rows are those of rank `holder` of `holders`. Ranks with the same `holder` have equal rows.
  int holder = 0, holders = 1;
  ProcessGroup group;  // of the holders
};

// The whole shape of a value of that kind as files have it.
std::vector<std::int64_t> sizes_in_file(const OwnRows& own, const std::string& kind);

// True for a sharded model or its optimizer.
bool has_shards(const Part& part);

class PartRows {
 public:
  // `prefix`: see prefix_of(). Throws Caller if a shard is not what it was when it was made.
  PartRows(const Part& part, const std::string& prefix);

  // The rows of the value of that name; null if this rank has the whole value. For the state of an
  // optimizer: those of its parameter, which the state has if its shape is the parameter's.
  const OwnRows* of(const std::string& name) const;
  // True for the state of an optimizer's parameter, which may have any shape.
  bool is_state(const std::string& name) const {
    return !states_.empty() && name.starts_with(states_);
  }
  // Notes in the value which rows it has.
  void mark(Value& value) const;

 private:
  std::map<std::string, OwnRows> rows_;  // by the value's name; of an optimizer by STATE.INDEX
  std::string states_;                   // the names of an optimizer's states begin so
};

// Collective. Some ranks may have equal rows, because a model is sharded over other ranks than
// those of the group. Leaves each of these ranks a part of them to write. All ranks pass the same
// names, and groups that are either `group` or not. Throws Caller on all ranks if none has some
// rows.
void divide_equal_rows(std::vector<Value>& values, ProcessGroup& group);

}  // namespace weft::checkpoint
