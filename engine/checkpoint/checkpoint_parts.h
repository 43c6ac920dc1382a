// What is in a checkpoint's archive, part by part. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checkpoint.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace weft::parallel {
class ShardedOptimizer;
}

namespace weft::checkpoint {

// Throws Caller for names that cannot be, and for what is not there. Returns the names and kinds of
// the parts, as errors say them.
std::vector<std::string> check_names(const std::vector<Part>& parts);

// The part's optimizer if its state is spread over ranks, else none.
parallel::ShardedOptimizer* sharded_optimizer_of(const Part& part);

void save_parts(torch::serialize::OutputArchive& archive, const std::vector<Part>& parts);

// What is left to be done once all parts fit on all ranks.
using Commit = std::function<void()>;
// Compares, and changes nothing. `device`: of tensors for which there is no memory yet. Throws
// Caller for the first that does not fit.
std::vector<Commit> stage_parts(torch::serialize::InputArchive& archive,
                                const std::vector<Part>& parts, c10::Device device);

}  // namespace weft::checkpoint
