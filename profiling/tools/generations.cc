// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/profiling/tools/generations.h>

namespace weft::tools {

void Generations::add(std::size_t process, const std::string& name, const std::vector<int>& ranks,
                      std::uint32_t generation) {
  std::uint32_t& newest = newest_[{name, ranks}].try_emplace(process, generation).first->second;
  newest = std::max(newest, generation);
}

bool Generations::came_later(std::size_t process, std::size_t other) const {
  const auto& own = jobs_.at(process);
  const auto& theirs = jobs_.at(other);
  if (own.empty() || theirs.empty() || own.back() != theirs.back()) return false;
  return std::ranges::any_of(
      theirs, [&](const std::string& job) { return std::ranges::find(own, job) == own.end(); });
}

std::uint32_t Generations::common(std::size_t process, const std::string& name,
                                  const std::vector<int>& ranks, std::uint32_t generation) const {
  const auto& newest = newest_.at({name, ranks});
  const std::uint32_t own = newest.at(process);
  std::uint32_t most = own;
  for (const auto& [other, theirs] : newest) {
    if (theirs > most && came_later(process, other)) most = theirs;
  }
  return generation + (most - own);
}

}  // namespace weft::tools
