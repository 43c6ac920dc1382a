// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/profiling/tools/waits.h>

namespace weft::tools {

std::vector<int> Waits::shortest_circle() const {
  std::vector<int> best;
  for (const auto& [start, edges] : waits_) {
    std::map<int, int> from{{start, start}};
    std::vector<int> front{start};
    for (std::size_t i = 0; i < front.size(); ++i) {
      const auto next = waits_.find(front[i]);
      if (next == waits_.end()) continue;
      for (const auto& [whom, in] : next->second) {
        if (whom == start) {
          std::vector<int> circle;
          for (int who = front[i]; who != start; who = from[who]) circle.push_back(who);
          circle.push_back(start);
          std::reverse(circle.begin(), circle.end());
          if (best.empty() || circle.size() < best.size()) best = circle;
        } else if (from.emplace(whom, front[i]).second) {
          front.push_back(whom);
        }
      }
    }
  }
  return best;
}

}  // namespace weft::tools
