#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/staged_lanes.h>

namespace weft::conformance {

StagedTransport::StagedTransport(const std::string& backend, std::unique_ptr<harness::FakeDriver> fake,
                                 std::shared_ptr<cuda::Device> device)
    : fake_(std::move(fake)), device_(std::move(device)), below_(transport::open(backend)) {
  const auto stage = std::make_shared<transport::staged::Stage>(std::vector{device_});
  connector_ = transport::staged::over(*below_->connector(), stage);
}

StagedTransport::~StagedTransport() {
  connector_.reset();
  below_.reset();
  reclaim(std::move(device_));
}

std::shared_ptr<StagedTransport> open_on_fake(const std::string& backend) {
  auto fake = std::make_unique<harness::FakeDriver>(harness::FakeDriver::Options{.threads = true});
  auto device = cuda::Device::open(fake->driver(), 0);
  return std::make_shared<StagedTransport>(backend, std::move(fake), std::move(device));
}

std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend) { return open_on_fake(backend); }

}  // namespace weft::conformance
