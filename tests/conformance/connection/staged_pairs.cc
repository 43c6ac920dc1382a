// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/staged_pairs.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>

namespace weft::conformance {

namespace {

namespace cuda_ipc = transport::cuda_ipc;

// CUDA IPC connections over another connector's.
class ByName final : public transport::Connector {
 public:
  ByName(std::unique_ptr<transport::Connector> below,
         std::shared_ptr<transport::staged::Stage> stage)
      : below_(std::move(below)), stage_(std::move(stage)) {}

  transport::Capabilities capabilities() const override {
    return cuda_ipc::capabilities_over(below_->capabilities());
  }
  int preference() const override { return below_->preference(); }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    return below_->why_unreachable(address);
  }
  std::unique_ptr<transport::Listener> listen(const transport::ListenOptions& options) override {
    transport::ListenOptions own = options;
    own.accepted = [stage = stage_, loop = std::weak_ptr(options.loop),
                    accepted = options.accepted](auto connection) {
      auto there = cuda_ipc::Identity::here();
      ++there.started;
      if (const auto here = loop.lock())
        accepted(cuda_ipc::over(std::move(connection), stage, here, there));
    };
    return below_->listen(own);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const transport::ConnectOptions& options) override {
    return cuda_ipc::over(below_->connect(address, options), stage_, options.loop);
  }

 private:
  std::unique_ptr<transport::Connector> below_;
  std::shared_ptr<transport::staged::Stage> stage_;
};

}  // namespace

StagedTransport::StagedTransport(const std::string& backend, Way way,
                                 std::unique_ptr<harness::FakeDriver> fake,
                                 std::shared_ptr<cuda::Device> device)
    : fake_(std::move(fake)), device_(std::move(device)), below_(transport::open(backend)) {
  const auto stage = std::make_shared<transport::staged::Stage>(std::vector{device_});
  connector_ = transport::staged::over(*below_->connector(), stage);
  if (way == Way::ByName) connector_ = std::make_unique<ByName>(std::move(connector_), stage);
}

StagedTransport::~StagedTransport() {
  connector_.reset();
  below_.reset();
  reclaim(std::move(device_));
}

std::shared_ptr<StagedTransport> open_on_fake(const std::string& backend, Way way) {
  auto fake = std::make_unique<harness::FakeDriver>(
      harness::FakeDriver::Options{.threads = true, .is_two_processes = way == Way::ByName});
  auto device = cuda::Device::open(fake->driver(), 0);
  return std::make_shared<StagedTransport>(backend, way, std::move(fake), std::move(device));
}

}  // namespace weft::conformance
