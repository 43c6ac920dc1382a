// Who takes care of what. Pure planning.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace weft::parallel {

// Deals items of these sizes out to ranks: the largest first, each to the rank that has least (the
// lowest of equals), so that no rank has more than the even share and one item. `loads`, one for
// each rank, holds what was dealt before and is added to. Returns each item's rank. The rule of
// torch.distributed.optim.ZeroRedundancyOptimizer.
std::vector<int> deal_balanced(std::span<const std::size_t> sizes, std::vector<std::size_t>& loads);

}  // namespace weft::parallel
