// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include <weft/engine/zero/partition.h>

namespace weft::parallel {

std::vector<int> deal_balanced(std::span<const std::size_t> sizes,
                               std::vector<std::size_t>& loads) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int> ranks(sizes.size());
  for (const std::size_t item : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += sizes[item];
    ranks[item] = static_cast<int>(least - loads.begin());
  }
  return ranks;
}

}  // namespace weft::parallel
