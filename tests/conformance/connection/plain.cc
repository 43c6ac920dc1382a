// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) {
  return transport::open(backend);
}

std::string name_for_claims(const std::string& backend) { return backend; }

ClaimsMemory memory_for_claims(transport::Transport&, std::size_t bytes) {
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  return {slice_of(*memory), memory};
}

void forget_for_claims(transport::Transport&) {}

}  // namespace weft::conformance
