// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

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

// c10d's flight recorder has a data race if several ranks run in one process, and takes a stack
// trace for each collective. Called before any rank of this process joins with Gloo, since other
// threads must not read the environment meanwhile.
void switch_flight_recorder_off() {
  static const bool done = [] {
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  switch_flight_recorder_off();
  return std::shared_ptr<Transport>(std::make_shared<Gloo>());
}

}  // namespace weft::transport::gloo
