// SPDX-License-Identifier: Apache-2.0
// Parts as tensors with names of their own, for files that hold nothing but tensors. Internal.
//
// The names: "model.first.weight" for a parameter of the part "model", "optimizer.state.0.exp_avg"
// and "optimizer.param_groups.0.lr" for an optimizer, "list.0", "epoch"; "random.rank2" for rank
// 2's value of a part that is per_rank().
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/checkpoint/part_rows.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace weft::checkpoint {

// The ranks that write a value.
enum class Writer {
  First,  // rank 0
  Any,    // all ranks have it, and divide the work
  Own,    // this rank, which alone has it
};

// The kind of a complex tensor: two reals for each element.
constexpr const char* kComplex = "complex128";
// The kind of a tensor that requires gradients.
constexpr const char* kRequiresGrad = "requires_grad";

struct Value {
  std::string name;
  at::Tensor tensor;  // the program's own, without a copy where it is one
  // How a tensor stands for a value of another type, such as "integer"; empty for a plain tensor.
  std::string kind;
  Writer writer = Writer::First;
  // The tensor is these rows of a larger value; Writer::Own.
  std::optional<OwnRows> rows;
};

// The values of a part on this rank. `ranks`: of the group. Throws Caller for a value that
// safetensors cannot hold, and if a value has no tensor.
std::vector<Value> values_of(const Part& part, int rank, int ranks);

// A name among those that dots divide: a dot inside of it is written as "%2e".
std::string step_of(const std::string& name);

// The name in front of all names of the part's values: the part's own, or that of its rank.
std::string prefix_of(const Part& part, int rank);
// True if the name is a value of the part with that prefix.
bool is_value_of(const std::string& name, const std::string& prefix);
// True if this rank needs the value to load the part.
bool is_needed(const Part& part, const std::string& prefix, const std::string& name, int rank);

// Writes a part into an archive in the form in which stage_parts() reads it. `values`: by name, at
// least those that is_needed() names.
void write_part(torch::serialize::OutputArchive& archive, const Part& part,
                const std::string& prefix, const std::map<std::string, Value>& values);

// Makes `to` read what was written to `from`, in memory.
void reopen(const torch::serialize::OutputArchive& from, torch::serialize::InputArchive& to);

}  // namespace weft::checkpoint
