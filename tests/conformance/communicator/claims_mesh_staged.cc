// SPDX-License-Identifier: Apache-2.0
// The claims on device memory for every backend that has connections: through pinned memory, on
// fake GPUs.
#include <weft/tests/conformance/communicator/fake_gpus.h>
#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

std::vector<std::shared_ptr<Setting>> settings() {
  std::vector<std::shared_ptr<Setting>> all;
  for (const std::string& backend : connecting_backends())
    all.push_back(std::make_shared<Staged>(backend, 3));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Mesh, CommunicatorClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
