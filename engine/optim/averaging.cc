// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <utility>

#include <weft/engine/ddp/flat.h>
#include <weft/engine/optim/averaging.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft {

void average_parameters(const std::vector<at::Tensor>& parameters, ProcessGroup group) {
  constexpr std::size_t kPiece = 25u << 20;
  constexpr std::size_t kAtOnce = 4;  // limits the second copy of a large model in memory
  if (!group || group.size() == 1) return;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string what = "average_parameters: parameter " + std::to_string(i);
    if (is_shard(parameters[i])) {
      throw Error(Blame::Caller,
                  what + " is sharded, and each rank has other rows of it; leave it out");
    }
    parallel::require_flat(parameters[i], what);
    if (parameters[i].is_floating_point() || parameters[i].is_complex()) continue;
    throw Error(Blame::Caller,
                what + " is of " + c10::toString(parameters[i].scalar_type()) +
                    ", which cannot be averaged; leave it out, or convert it to floating point");
  }
  struct UnderWay {
    std::vector<at::Tensor> parameters;
    at::Tensor flat;
    Work work;
  };
  std::deque<UnderWay> pieces;
  const auto finish_first = [&] {
    pieces.front().work.wait();
    parallel::unflatten(pieces.front().flat, pieces.front().parameters);
    pieces.pop_front();
  };
  for (auto& piece : parallel::pieces_of(parameters, kPiece)) {
    if (pieces.size() == kAtOnce) finish_first();
    const at::Tensor flat = parallel::flatten(piece);
    pieces.push_back({std::move(piece), flat, group.all_reduce(flat, ReduceOp::Avg)});
  }
  while (!pieces.empty()) finish_first();
}

PeriodicAverager::PeriodicAverager(ProcessGroup group, PeriodicAveragerOptions options)
    : group_(std::move(group)), options_(options) {
  if (options_.period < 1 || options_.warmup_steps < 0) {
    throw Error(Blame::Caller,
                "PeriodicAveragerOptions: period is " + std::to_string(options_.period) +
                    " and must be at least 1, warmup_steps is " +
                    std::to_string(options_.warmup_steps) + " and must be at least 0");
  }
}

bool PeriodicAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const int counted = steps_++ - options_.warmup_steps;
  const bool is_time = counted >= 0 && counted % options_.period == 0;
  if (is_time) weft::average_parameters(parameters, group_);
  return is_time;
}

}  // namespace weft
