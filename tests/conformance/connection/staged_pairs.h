// SPDX-License-Identifier: Apache-2.0
// A backend whose connections carry device memory through pinned memory, or by CUDA IPC if it can
// be shared, on a fake GPU or a real one.
#pragma once

#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/harness/fake_driver.h>
#include <weft/transport/staged/staged_connection.h>

namespace weft::conformance {

// ByName: by CUDA IPC; the two ends of a connection take each other for two processes, which a fake
// driver plays (is_two_processes). Direct: not through host memory, if the backend's network has
// been told to read and write GPU memory itself.
enum class Way { Pinned, Direct, ByName };

class StagedTransport final : public transport::Transport {
 public:
  // `fake` may be null; then `device` is a real one.
  StagedTransport(const std::string& backend, Way way, std::unique_ptr<harness::FakeDriver> fake,
                  std::shared_ptr<cuda::Device> device);
  // Reclaims the memory that connections retired; by then nothing else may refer to the device.
  ~StagedTransport() override;

  std::string_view name() const override { return below_->name(); }
  transport::Connector* connector() override { return connector_.get(); }
  bool reaches(DeviceType) const override { return true; }
  std::shared_ptr<transport::Communicator> join(const transport::JoinOptions& options) override {
    return below_->join(options);
  }
  const std::shared_ptr<cuda::Device>& device() const { return device_; }
  harness::FakeDriver* fake() const { return fake_.get(); }

 private:
  std::unique_ptr<harness::FakeDriver> fake_;
  std::shared_ptr<cuda::Device> device_;
  std::shared_ptr<transport::Transport> below_;
  std::unique_ptr<transport::Connector> connector_;
};

std::shared_ptr<StagedTransport> open_on_fake(const std::string& backend, Way way);

}  // namespace weft::conformance
