// SPDX-License-Identifier: Apache-2.0
// Connections over shared memory that lend their long payloads, also where two copies are faster.
#include <cstdlib>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {

namespace {

// Before main(), because the environment is read once.
[[maybe_unused]] const int kSet = ::setenv("WEFT_SHM_COPIES", "1", /*overwrite=*/1);

}  // namespace

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
