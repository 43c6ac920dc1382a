#include <weft/tests/conformance/connection/lanes.h>

namespace weft::conformance {

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) { return transport::open(backend); }

std::string name_for_claims(const std::string& backend) { return backend; }

}  // namespace weft::conformance
