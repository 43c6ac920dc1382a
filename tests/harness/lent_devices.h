// SPDX-License-Identifier: Apache-2.0
// The devices of a FakeDriver that agents hold, some of them for a moment after their handles are
// destroyed.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/deadline.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/tests/harness/fake_driver.h>
#include <weft/transport/cuda_ipc/wire.h>

namespace weft::harness {

class LentDevices {
 public:
  // `here`: the identity that the agent claims for its process; null: this process's.
  std::shared_ptr<tensor::CudaDevices> lend(
      const FakeDriver& driver,
      std::shared_ptr<const transport::cuda_ipc::Identity> here = nullptr) {
    auto devices = std::make_shared<tensor::CudaDevices>(driver.driver(), std::move(here));
    std::lock_guard lock(mutex_);
    lent_.push_back(devices);
    return devices;
  }
  // Call it before the driver is destroyed.
  void wait_until_given_back() {
    const Deadline deadline = Deadline::in(std::chrono::seconds(20));
    for (const auto& one : lent_) {
      while (!one.expired() && !deadline.passed()) std::this_thread::yield();
      EXPECT_TRUE(one.expired()) << "an agent that has left still holds its GPUs";
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<tensor::CudaDevices>> lent_;
};

// Returns an identity that differs for each rank, so that agents take each other for other
// processes and read each other's memory in place.
inline std::shared_ptr<const transport::cuda_ipc::Identity> other_process(int rank) {
  auto here =
      std::make_shared<transport::cuda_ipc::Identity>(transport::cuda_ipc::Identity::here());
  here->started += static_cast<std::uint64_t>(rank);
  return here;
}

}  // namespace weft::harness
