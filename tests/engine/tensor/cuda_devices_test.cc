// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>

#include <weft/cuda/memory.h>
#include <weft/engine/future/future.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/harness/fake_torch_cuda.h>

namespace weft {
namespace {

using harness::FakeDriver;
using harness::FakeTorchCuda;

class CudaDevices : public testing::Test {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>();
    torch_ = std::make_unique<FakeTorchCuda>(*fake_);
    devices_ = std::make_shared<tensor::CudaDevices>(fake_->driver());
  }
  void TearDown() override {
    if (fake_) fake_->run();
  }

  // Enqueues a write of a byte over the whole tensor.
  void fill(const c10::Stream& stream, const at::Tensor& tensor, unsigned char byte) {
    cuda::fill(torch_->view(stream), tensor::slice_of(tensor), byte);
  }
  static int byte_of(const at::Tensor& tensor) {
    return *static_cast<const unsigned char*>(tensor.const_data_ptr());
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  std::shared_ptr<tensor::CudaDevices> devices_;
  const c10::Device gpu_{c10::kCUDA, 0};
};

TEST_F(CudaDevices, ReadyFollowsTheCurrentStream) {
  const at::Tensor tensor = torch_->empty({4}, at::kByte);
  const c10::Stream side = torch_->new_stream();
  fake_->run();
  Fence ready;
  {
    const c10::StreamGuard current(side);
    fill(side, tensor, 7);
    ready = devices_->ready(gpu_);
  }
  EXPECT_FALSE(ready.query());
  fake_->run(torch_->view(torch_->current()));
  EXPECT_FALSE(ready.query()) << "it is not recorded on the stream that was current";
  fake_->run(torch_->view(side));
  EXPECT_TRUE(ready.query());
}

TEST_F(CudaDevices, CpuIsAlwaysReady) {
  EXPECT_TRUE(devices_->ready(c10::Device(c10::kCPU)).query());
}

TEST_F(CudaDevices, WaitDelaysLaterWorkOfTheStream) {
  const at::Tensor tensor = torch_->empty({4}, at::kByte);
  const c10::Stream writer = torch_->new_stream();
  const c10::Stream reader = torch_->new_stream();
  fake_->run();
  fill(writer, tensor, 1);
  devices_->wait(devices_->recorded(writer), reader);
  fill(reader, tensor, 2);
  fake_->run(torch_->view(reader));
  EXPECT_NE(byte_of(tensor), 2);
  fake_->run();
  EXPECT_EQ(byte_of(tensor), 2);
  EXPECT_EQ(fake_->host_blocks(), 0);
}

TEST_F(CudaDevices, OneDeviceIsOpenedOnce) { EXPECT_EQ(devices_->open(0), devices_->open(0)); }

TEST_F(CudaDevices, UnknownDeviceIsRefused) {
  try {
    devices_->open(5);
    FAIL() << "opened a device that is not there";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  }
}

// --- futures whose value is still being written

TEST_F(CudaDevices, FutureIsDoneBeforeTheWrite) {
  const at::Tensor tensor = torch_->empty({4}, at::kByte);
  const c10::Stream writer = torch_->new_stream();
  fake_->run();
  Promise<at::Tensor> promise;
  const Future<at::Tensor> future = promise.future();
  fill(writer, tensor, 5);
  promise.set_with(devices_->work(gpu_, {devices_->recorded(writer)}), tensor);
  EXPECT_TRUE(future.done());
  const at::Tensor got = future.get();
  const at::Tensor copy = torch_->empty({4}, at::kByte);
  cuda::copy(torch_->view(torch_->current()), tensor::slice_of(copy), tensor::slice_of(got));
  fake_->run(torch_->view(torch_->current()));
  EXPECT_NE(byte_of(copy), 5) << "the current stream did not wait";
  fake_->run();
  EXPECT_EQ(byte_of(copy), 5);
  EXPECT_EQ(torch_->recorded_uses(), 1);
  EXPECT_EQ(fake_->host_blocks(), 0);
}

TEST_F(CudaDevices, ThenRunsOnAWaitingStream) {
  const at::Tensor tensor = torch_->empty({4}, at::kByte);
  const c10::Stream writer = torch_->new_stream();
  fake_->run();
  Promise<at::Tensor> promise;
  const c10::Stream outside = torch_->current();
  c10::Stream inside = outside;
  const auto next = promise.future().then([&](const at::Tensor& value) {
    inside = torch_->current();
    fill(inside, value, 6);
    return value;
  });
  fill(writer, tensor, 5);
  promise.set_with(devices_->work(gpu_, {devices_->recorded(writer)}), tensor);
  ASSERT_TRUE(next.done());
  EXPECT_FALSE(inside == outside);
  EXPECT_TRUE(torch_->current() == outside);
  EXPECT_FALSE(inside == writer);
  const at::Tensor copy = torch_->empty({4}, at::kByte);
  cuda::copy(torch_->view(outside), tensor::slice_of(copy), tensor::slice_of(next.get()));
  // In any order in which the streams make progress.
  fake_->run(torch_->view(outside));
  fake_->run(torch_->view(inside));
  EXPECT_NE(byte_of(tensor), 6) << "the continuation's stream did not wait";
  fake_->run();
  EXPECT_EQ(byte_of(copy), 6);
}

TEST_F(CudaDevices, WhenAllWaitsForEveryFuture) {
  const at::Tensor tensor = torch_->empty({4}, at::kByte);
  const c10::Stream one = torch_->new_stream();
  const c10::Stream other = torch_->new_stream();
  fake_->run();
  Promise<int> first;
  Promise<at::Tensor> second;
  const auto all = when_all(first.future(), second.future());
  const auto then = all.then([&](const std::tuple<int, at::Tensor>& values) {
    fill(torch_->current(), std::get<1>(values), 9);
    return std::get<0>(values);
  });
  fill(one, tensor, 1);
  first.set_with(devices_->work(gpu_, {devices_->recorded(one)}), 3);
  EXPECT_FALSE(all.done());
  fill(other, tensor, 2);
  second.set_with(devices_->work(gpu_, {devices_->recorded(other)}), tensor);
  EXPECT_EQ(then.get(), 3);
  fake_->hold(torch_->view(one));
  fake_->run();
  EXPECT_EQ(byte_of(tensor), 2) << "the continuation ran before the first future's work";
  fake_->release(torch_->view(one));
  fake_->run();
  EXPECT_EQ(byte_of(tensor), 9);
}

TEST_F(CudaDevices, FailedFutureMakesNoStreamWait) {
  Promise<at::Tensor> promise;
  const auto future = promise.future();
  promise.set_error(Error(Blame::PeerLost, "rank 1 is lost"));
  EXPECT_THROW(future.get(), Error);
  EXPECT_EQ(future.device_work(), nullptr);
}

TEST_F(CudaDevices, RefusesWorkDuringCapture) {
  const c10::Stream side = torch_->new_stream();
  fake_->run();
  FakeDriver::Graph graph;
  devices_->refuse_capture(gpu_, "this", "of a reason");
  ASSERT_EQ(fake_->begin_capture(torch_->view(side)), CUDA_SUCCESS);
  devices_->refuse_capture(gpu_, "this", "of a reason");  // another stream is being captured
  const c10::StreamGuard current(side);
  devices_->refuse_capture(c10::Device(c10::kCPU), "this", "of a reason");
  try {
    devices_->refuse_capture(gpu_, "this", "of a reason");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_EQ(error.text(),
              "this cannot be captured into a CUDA graph, but the current stream of cuda:0 is "
              "being captured: of a reason");
  }
  EXPECT_TRUE(tensor::CudaDevices::is_captured(devices_->ready(gpu_)));
  ASSERT_EQ(fake_->end_capture(torch_->view(side), graph), CUDA_SUCCESS);
  devices_->refuse_capture(gpu_, "this", "of a reason");
  EXPECT_FALSE(tensor::CudaDevices::is_captured(devices_->ready(gpu_)));
}

}  // namespace
}  // namespace weft
