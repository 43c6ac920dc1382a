// SPDX-License-Identifier: Apache-2.0
// Deals parameters out to ranks. Touches no tensors: the caller says how much each item weighs
// (ShardedOptimizer::lay_out(), and the shares of a checkpoint).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace weft::parallel {

// Deals items of these sizes out to ranks, the largest first, each to the rank with the smallest
// load (the lowest of equals), so that no rank has more than the even share and one item. `loads`,
// one for each rank, holds the sizes dealt before, and these are added to it. Returns each item's
// rank. The rule is that of torch.distributed.optim.ZeroRedundancyOptimizer.
std::vector<int> deal_balanced(std::span<const std::size_t> sizes, std::vector<std::size_t>& loads);

}  // namespace weft::parallel
