// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/staged_pairs.h>

namespace weft::conformance {

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) {
  return open_on_fake(backend, Way::Pinned);
}

std::string name_for_claims(const std::string& backend) { return backend; }

ClaimsMemory memory_for_claims(transport::Transport& on, std::size_t bytes) {
  Rank bench;
  equip(bench, dynamic_cast<StagedTransport&>(on).device());
  const auto memory = bench.allocate(bytes);
  return {memory->slice(), memory};
}

void forget_for_claims(transport::Transport& on) {
  if (const auto fake = dynamic_cast<StagedTransport&>(on).fake(); fake != nullptr) fake->forget();
}

}  // namespace weft::conformance
