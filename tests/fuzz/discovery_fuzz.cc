// SPDX-License-Identifier: Apache-2.0
// Any host on the network may send a datagram to a rendezvous by multicast. A datagram is either
// refused or unchanged when it is written again; a state that has received it still makes
// announcements that can be read. The input consists of datagrams, each after a byte with its
// length.
#include <cstdint>
#include <span>
#include <string>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/rendezvous/discovery.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  using namespace weft::group;
  Announcement self;
  self.nonce = 7;
  self.world_size = 2;
  self.port = 1007;
  self.group = "job";
  DiscoveryState::Time now{};
  DiscoveryState state(self, now);
  std::span<const std::uint8_t> left(data, bytes);
  while (!left.empty()) {
    const std::size_t count = std::min<std::size_t>(left[0], left.size() - 1);
    const std::string datagram(left.begin() + 1,
                               left.begin() + 1 + static_cast<std::ptrdiff_t>(count));
    left = left.subspan(1 + count);
    now += std::chrono::milliseconds(100);
    const auto heard = decode(datagram);
    if (!heard) continue;
    if (encode(*heard) != datagram) broken("a datagram changes when it is written");
    state.hear(*heard, "10.0.0.1", now);
    const auto mine = decode(encode(state.to_announce(now)));
    if (!mine || mine->nonce != self.nonce || mine->world_size != 2)
      broken("an announcement cannot be read");
  }
  return 0;
}
