#include <weft/tests/conformance/connection/staged_lanes.h>

namespace weft::conformance {

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) {
  return open_on_fake(backend, Way::Pinned);
}

std::string name_for_claims(const std::string& backend) { return backend; }

}  // namespace weft::conformance
