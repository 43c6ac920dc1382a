// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/transport/transports_text.h>

namespace weft::transport {

namespace {

constexpr std::size_t kMostNamed = 16;  // ranks that the text names

}  // namespace

std::string transports_text(const Communicator& communicator) {
  std::map<std::string, std::vector<int>> ranks;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer != communicator.rank()) ranks[communicator.transport(peer)].push_back(peer);
  }
  std::string text;
  for (const auto& [transport, peers] : ranks) {
    text +=
        (text.empty() ? "" : "; ") + transport + " to " +
        (peers.size() <= kMostNamed ? ranks_text(peers) : std::to_string(peers.size()) + " ranks");
  }
  return text;
}

}  // namespace weft::transport
