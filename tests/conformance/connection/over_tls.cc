// SPDX-License-Identifier: Apache-2.0
// tcp connections that speak TLS (WEFT_TLS_CERT).
#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/harness/certificates.h>
#include <weft/transport/tcp/tcp.h>

namespace weft::conformance {

namespace {

// Made before a test forks, so that all of its processes have it.
const auto credentials =
    std::make_shared<const transport::tls::Credentials>(harness::Authority().issue());

}  // namespace

std::shared_ptr<transport::Transport> open_for_claims(const std::string&) {
  transport::tcp::Settings settings;
  settings.credentials = credentials;
  return std::make_shared<transport::tcp::Tcp>(settings);
}

std::string name_for_claims(const std::string& backend) { return backend; }

ClaimsMemory memory_for_claims(transport::Transport&, std::size_t bytes) {
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  return {slice_of(*memory), memory};
}

void forget_for_claims(transport::Transport&) {}

}  // namespace weft::conformance
