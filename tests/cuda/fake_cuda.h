// SPDX-License-Identifier: Apache-2.0
// The fixture for the tests of cuda/: a fake driver, a device, and a log sink that fails the test
// at unexpected errors.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/deadline.h>
#include <weft/base/log.h>
#include <weft/cuda/device.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/stream.h>
#include <weft/tests/harness/fake_driver.h>

namespace weft::cuda {

// Returns the error that `call` throws; fails the test if it throws none.
template <class Call>
Error error_from(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {Blame::Cancelled, "nothing was thrown"};
}

class FakeCuda : public testing::Test {
 protected:
  explicit FakeCuda(harness::FakeDriver::Options options = {})
      : fake(options), device(Device::open(fake.driver(), 0)) {}
  // A thread that the test has left behind, such as a call of NCCL that was held, may keep the
  // device open a moment longer. The next test would then open it with the end of this driver.
  ~FakeCuda() override {
    const std::weak_ptr<Device> open = device;
    device.reset();
    EXPECT_TRUE(poll_until([&] { return open.expired(); }, Deadline::in(std::chrono::seconds(10))))
        << "something still holds the device";
  }

  void TearDown() override {
    for (const std::string& text : take_logged()) ADD_FAILURE() << "unexpected: " << text;
  }

  // Returns the errors and warnings logged so far; from then on they count as expected.
  std::vector<std::string> take_logged() {
    std::lock_guard lock(mutex_);
    return std::exchange(logged_, {});
  }

 private:
  std::mutex mutex_;  // guards logged_
  std::vector<std::string> logged_;
  log::Capture capture_{[this](LogLevel level, std::string_view text) {
    if (level != LogLevel::Error && level != LogLevel::Warn) return;
    std::lock_guard lock(mutex_);
    logged_.emplace_back(text);
  }};

 protected:
  harness::FakeDriver fake;
  std::shared_ptr<Device> device;
};

// The same with a thread for each stream: for races.
class ThreadedCuda : public FakeCuda {
 protected:
  ThreadedCuda() : FakeCuda({.threads = true}) {}
};

}  // namespace weft::cuda
