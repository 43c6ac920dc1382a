// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/connection/staged_pairs.h>

namespace weft::conformance {

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) {
  return open_on_fake(backend, Way::ByName);
}

std::string name_for_claims(const std::string&) { return "cuda_ipc"; }

}  // namespace weft::conformance
