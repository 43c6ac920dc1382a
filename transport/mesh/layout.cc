// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include <weft/transport/mesh/layout.h>

namespace weft::transport::mesh {

Layout::Layout(std::span<const std::uint32_t> host_of_rank) {
  std::map<std::uint32_t, int> numbers;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto [found, is_new] = numbers.emplace(host_of_rank[rank], hosts());
    if (is_new) ranks_.emplace_back();
    auto& members = ranks_[static_cast<std::size_t>(found->second)];
    host_of_.push_back(found->second);
    place_of_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(rank));
    slices_ = std::max(slices_, static_cast<int>(members.size()));
  }
  for (int slice = 0; slice < slices_; ++slice) {
    std::vector<int>& owners = owners_.emplace_back();
    for (const auto& members : ranks_) {
      const auto place =
          static_cast<std::size_t>(slice) * members.size() / static_cast<std::size_t>(slices_);
      owners.push_back(members[place]);
    }
  }
}

}  // namespace weft::transport::mesh
