// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/gloo/gloo_communicator.h>
#include <weft/transport/registry.h>

namespace weft::transport::gloo {

namespace {

class Gloo final : public Transport {
 public:
  std::string_view name() const override { return "gloo"; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    return std::make_shared<GlooCommunicator>(options);
  }
};

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  return std::shared_ptr<Transport>(std::make_shared<Gloo>());
}

}  // namespace weft::transport::gloo
