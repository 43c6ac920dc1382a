// SPDX-License-Identifier: Apache-2.0
// Writes and reads the parts of a checkpoint's archive. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/group/process_group.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace weft::parallel {
class ShardedOptimizer;
}

namespace weft::checkpoint {

// Throws Caller for an empty or repeated name, for a null pointer, and inside of weft::join for the
// optimizer of a sharded model. Returns the names and kinds of the parts, as errors show them.
std::vector<std::string> check_names(const std::vector<Part>& parts);

// Throws Caller if a parameter or buffer is on the meta device: what is copied to it is lost.
void require_values(const torch::nn::Module& module, const std::string& part);

// The part's optimizer if its state is spread over ranks; null otherwise.
parallel::ShardedOptimizer* sharded_optimizer_of(const Part& part);

// Collective; blocks. While the result lives, a sharded model, or the optimizer of one, is whole on
// all ranks. `writable`: at the end each rank keeps its rows of what was written. Null for other
// parts.
std::shared_ptr<void> hold_whole(const Part& part, bool writable);
// The same for all parts, which all ranks name alike. Throws on all ranks if one fails.
std::vector<std::shared_ptr<void>> hold_all_whole(const std::vector<Part>& parts, bool writable,
                                                  ProcessGroup& group);

void save_parts(torch::serialize::OutputArchive& archive, const std::vector<Part>& parts);

enum class Copies {
  OnHost,  // tensors of GPUs and parts of larger storages are copied
  None,    // the archive has the program's own tensors
};
void save_part(torch::serialize::OutputArchive& archive, const Part& part, Copies copies);
void save_optimizer(torch::serialize::OutputArchive& archive, torch::optim::Optimizer& optimizer);
// The key, beside libtorch's own in an optimizer's archive, of its parameters' groups, dtypes and
// shapes, one line each.
constexpr const char* kParameters = "weft_parameters";

// Writes one part's values into the program; runs once all parts fit on all ranks.
using Commit = std::function<void()>;
// Compares the parts with the archive and changes nothing. `device`: for tensors that have no
// memory yet. Throws Caller for the first part that does not fit.
std::vector<Commit> stage_parts(torch::serialize::InputArchive& archive,
                                const std::vector<Part>& parts, c10::Device device);

}  // namespace weft::checkpoint
