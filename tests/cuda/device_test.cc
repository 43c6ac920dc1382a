// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/device.h>
#include <weft/cuda/event.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class TwoDevices : public FakeCuda {
 protected:
  TwoDevices() : FakeCuda({.devices = 2}) {}

  CUcontext current() {
    CUcontext context = nullptr;
    device->driver().ctx_get_current(&context);
    return context;
  }
  std::shared_ptr<Device> other = Device::open(fake.driver(), 1);
};

TEST_F(TwoDevices, AreCountedAndOpenedByIndex) {
  EXPECT_EQ(Device::count(device->driver()), 2);
  EXPECT_EQ(other->index(), 1);
  EXPECT_EQ(other->id(), weft::Device::cuda(1));
  EXPECT_EQ(other->properties().compute_capability, 90);
  EXPECT_TRUE(other->properties().memory_pools);
  const Error error = error_from([&] { Device::open(fake.driver(), 2); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), AllOf(HasSubstr("no cuda:2"), HasSubstr("sees 2 GPU")));
}

TEST_F(TwoDevices, ShareOnePrimaryContextPerDevice) {
  auto again = Device::open(fake.driver(), 1);
  EXPECT_EQ(again->context(), other->context());
  again.reset();
  EXPECT_EQ(fake.alive().contexts, 2u);
  other.reset();
  EXPECT_EQ(fake.alive().contexts, 1u);
}

TEST_F(TwoDevices, GuardSetsAndRestoresTheContext) {
  EXPECT_EQ(current(), nullptr);
  {
    DeviceGuard outer(*device);
    EXPECT_EQ(current(), device->context());
    {
      DeviceGuard inner(*other);
      EXPECT_EQ(current(), other->context());
      DeviceGuard same(*other);
      EXPECT_EQ(current(), other->context());
    }
    EXPECT_EQ(current(), device->context());
  }
  EXPECT_EQ(current(), nullptr);
}

TEST_F(TwoDevices, GuardRestoresAfterAnException) {
  DeviceGuard outer(*device);
  EXPECT_THROW(
      {
        DeviceGuard inner(*other);
        other->check(CUDA_ERROR_INVALID_VALUE, "cuSomething");
      },
      Error);
  EXPECT_EQ(current(), device->context());
}

TEST_F(TwoDevices, GuardSkipsACurrentContext) {
  DeviceGuard outer(*device);
  const int before = fake.calls(&Driver::ctx_set_current);
  { DeviceGuard inner(*device); }
  EXPECT_EQ(fake.calls(&Driver::ctx_set_current), before);
}

TEST_F(TwoDevices, GuardLogsAFailedRestore) {
  {
    DeviceGuard guard(*device);
    fake.fail(&Driver::ctx_set_current, CUDA_ERROR_UNKNOWN);
  }
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("cuCtxSetCurrent back from cuda:0")));
  device->driver().ctx_set_current(nullptr);
}

TEST_F(TwoDevices, FailedOpenReleasesTheContext) {
  other.reset();
  fake.fail(&Driver::event_create, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(error_from([&] { Device::open(fake.driver(), 1); }).blame(), Blame::Busy);
  EXPECT_EQ(fake.alive().contexts, 1u);
}

using OneDevice = FakeCuda;

TEST_F(OneDevice, RemembersThatItsContextEnded) {
  EXPECT_TRUE(device->probe());
  EXPECT_FALSE(device->lost());
  fake.lose_context(0, CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_FALSE(device->probe());
  ASSERT_TRUE(device->lost());
  EXPECT_EQ(device->lost()->blame(), Blame::Device);
  EXPECT_EQ(device->lost()->native_code(), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_THAT(take_logged(),
              ElementsAre(HasSubstr("cuda:0 is lost: CUDA_ERROR_ECC_UNCORRECTABLE")));
  device->lose(CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(device->lost()->native_code(), CUDA_ERROR_ECC_UNCORRECTABLE) << "the first cause stays";
  EXPECT_THAT(take_logged(), testing::IsEmpty()) << "said once";
}

TEST_F(OneDevice, AnyCallDetectsALostContext) {
  Stream stream(*device);
  fake.lose_context(0);
  EXPECT_EQ(error_from([&] { stream.query(); }).blame(), Blame::Device);
  EXPECT_TRUE(device->is_lost());
  take_logged();
}

TEST_F(OneDevice, ClosingWithRetiredMemoryWarns) {
  device->retirement().retire(Fence(), [] {});
  device.reset();
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("1 retired allocation(s) never reclaimed")));
}

TEST_F(OneDevice, LivesAsLongAsItsStreams) {
  auto stream = std::make_unique<Stream>(*device);
  device.reset();
  EXPECT_EQ(fake.alive().contexts, 1u);
  stream.reset();
  EXPECT_EQ(fake.alive().contexts, 0u);
}

// The driver also returns CUDA_ERROR_UNKNOWN for a single failed call and keeps working.
TEST_F(OneDevice, UnknownErrorIsLossIfTheProbeFails) {
  const Stream stream(*device);
  fake.fail(&Driver::stream_query, CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(error_from([&] { static_cast<void>(stream.query()); }).native_code(),
            CUDA_ERROR_UNKNOWN);
  EXPECT_FALSE(device->is_lost());
  fake.fail(&Driver::stream_query, CUDA_ERROR_UNKNOWN);
  fake.fail(&Driver::event_query, CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(error_from([&] { static_cast<void>(stream.query()); }).native_code(),
            CUDA_ERROR_UNKNOWN);
  EXPECT_TRUE(device->is_lost());
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("cuda:0 is lost: CUDA_ERROR_UNKNOWN")));
}

TEST_F(OneDevice, ProbeThatCannotStartIsLoss) {
  const Stream stream(*device);
  fake.fail(&Driver::stream_query, CUDA_ERROR_UNKNOWN);
  fake.fail(&Driver::ctx_get_current, CUDA_ERROR_UNKNOWN, 2);
  EXPECT_EQ(error_from([&] { static_cast<void>(stream.query()); }).native_code(),
            CUDA_ERROR_UNKNOWN);
  EXPECT_TRUE(device->is_lost());
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("cuda:0 is lost: CUDA_ERROR_UNKNOWN")));
}

// A program's last objects may be destroyed after the driver has shut down.
TEST_F(OneDevice, OutlivesTheDriverQuietly) {
  auto stream = std::make_unique<Stream>(*device);
  fake.fail(&Driver::ctx_get_current, CUDA_ERROR_DEINITIALIZED);
  stream.reset();
  EXPECT_TRUE(device->is_lost());
}

}  // namespace
}  // namespace weft::cuda
