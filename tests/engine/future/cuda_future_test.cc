// SPDX-License-Identifier: Apache-2.0
// Futures whose values are on GPUs, over the fake driver.
#include <map>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <weft/codec.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/engine/autograd/gradients.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/future.h>
#include <weft/tests/harness/fake_torch_cuda.h>

namespace weft {
namespace {

using harness::FakeDriver;
using harness::FakeTorchCuda;

struct Parcel {
  int number = 0;
  std::vector<at::Tensor> content;
  WEFT_FIELDS(number, content)
};
struct Crate {
  std::map<std::string, std::optional<Parcel>> parcels;
  std::pair<int, std::string> label;
  WEFT_FIELDS(parcels, label)
};

at::Tensor tensor_in(const at::Tensor& value) { return value; }
at::Tensor tensor_in(const std::vector<at::Tensor>& value) { return value.at(1); }
at::Tensor tensor_in(const Parcel& value) { return value.content.at(0); }
at::Tensor tensor_in(const Crate& value) { return value.parcels.at("it")->content.at(0); }
at::Tensor tensor_in(const std::variant<int, at::Tensor>& value) {
  return std::get<at::Tensor>(value);
}
at::Tensor tensor_in(const std::tuple<int, std::array<at::Tensor, 1>>& value) {
  return std::get<1>(value)[0];
}

class CudaFuture : public testing::Test {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    driver_ = std::make_unique<FakeDriver>(FakeDriver::Options{.devices = 2, .threads = true});
    cuda_ = std::make_unique<FakeTorchCuda>(*driver_);
  }

  // Streams that a test no longer looks at may still have to wait for work that it has released.
  void TearDown() override {
    const Deadline patience = Deadline::in(std::chrono::seconds(20));
    while (driver_ && driver_->pending() > 0 && !patience.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  cuda::StreamRef current(int device) { return cuda_->view(cuda_->current(device)); }
  at::Tensor zeros(int device = 0) {
    const at::Tensor tensor = cuda_->empty({64}, at::kByte, device);
    cuda::fill(current(device), tensor::slice_of(tensor), 0);
    synchronize(current(device));
    return tensor;
  }
  at::Tensor zeros_enqueued() {
    const at::Tensor tensor = cuda_->empty({64}, at::kByte, 0);
    fill(tensor, 0);
    return tensor;
  }
  static void synchronize(const cuda::StreamRef& stream) {
    EXPECT_TRUE(cuda::record(stream).synchronize(Deadline::in(std::chrono::seconds(20))));
  }
  // Enqueues on the current stream, and so after the work that this stream waits for.
  void fill(const at::Tensor& tensor, unsigned char byte) {
    cuda::fill(current(tensor.device().index()), tensor::slice_of(tensor), byte);
  }
  static int first_byte(const at::Tensor& tensor) {
    return *static_cast<const unsigned char*>(tensor.const_data_ptr());
  }

  // Sets a promise on a stream that has not written the value yet; a reader on another stream must
  // see it written.
  template <class T>
  void expect_ordered(const T& value) {
    const at::Tensor tensor = tensor_in(value);
    const c10::Stream writing = cuda_->new_stream(), reading = cuda_->new_stream();
    driver_->hold(cuda_->view(writing));
    Promise<T> promise;
    const Future<T> future = promise.future();
    const at::Tensor seen = zeros();
    {
      const c10::StreamGuard on(writing);
      fill(tensor, 7);
      promise.set(value);
    }
    ASSERT_TRUE(future.done()) << "it is enough that the host has enqueued the write";
    const int uses = cuda_->recorded_uses();
    {
      const c10::StreamGuard on(reading);
      const at::Tensor got = tensor_in(future.get());
      EXPECT_GT(cuda_->recorded_uses(), uses) << "the allocator knows of the other stream";
      cuda::copy(current(0), tensor::slice_of(seen), tensor::slice_of(got));
    }
    EXPECT_GT(driver_->pending(cuda_->view(reading)), 0u) << "the stream waits, the host went on";
    driver_->release(cuda_->view(writing));
    synchronize(cuda_->view(reading));
    EXPECT_EQ(first_byte(seen), 7);
  }

  std::unique_ptr<FakeDriver> driver_;
  std::unique_ptr<FakeTorchCuda> cuda_;
};

TEST_F(CudaFuture, ReaderWaitsForTheWritingStream) {
  expect_ordered(zeros());
  expect_ordered(std::vector<at::Tensor>{at::Tensor(), zeros()});
  expect_ordered(Parcel{1, {zeros()}});
  Crate crate;
  crate.parcels["none"] = std::nullopt;
  crate.parcels["it"] = Parcel{2, {zeros()}};
  expect_ordered(crate);
  expect_ordered(std::variant<int, at::Tensor>(zeros()));
  expect_ordered(std::tuple<int, std::array<at::Tensor, 1>>(3, {zeros()}));
}

TEST_F(CudaFuture, ReadyFutureCarriesItsStream) {
  const at::Tensor tensor = zeros();
  const c10::Stream writing = cuda_->new_stream();
  driver_->hold(cuda_->view(writing));
  std::optional<Future<at::Tensor>> future;
  {
    const c10::StreamGuard on(writing);
    fill(tensor, 5);
    future = Future<at::Tensor>::ready(tensor);
  }
  const c10::Stream reading = cuda_->new_stream();
  const c10::StreamGuard on(reading);
  future->wait();
  EXPECT_EQ(driver_->pending(cuda_->view(reading)), 1u)
      << "the stream waits, and with it its later work";
  driver_->release(cuda_->view(writing));
  synchronize(cuda_->view(reading));
}

TEST_F(CudaFuture, ValuesWithoutGpusNeedNoWait) {
  EXPECT_EQ(Future<int>::ready(1).device_work(), nullptr);
  EXPECT_EQ(Future<at::Tensor>::ready(at::empty({2})).device_work(), nullptr);
  EXPECT_EQ(Future<at::Tensor>::ready(at::Tensor()).device_work(), nullptr);
  EXPECT_EQ(Future<std::vector<std::string>>::ready({"a"}).device_work(), nullptr);
}

TEST_F(CudaFuture, ContinuationMayUseAnotherGpu) {
  const at::Tensor here = zeros(0), there = zeros(1), seen = zeros(1);
  const c10::Stream writing = cuda_->new_stream(0);
  driver_->hold(cuda_->view(writing));
  Promise<at::Tensor> promise;
  const auto child = promise.future().then([&](const at::Tensor& value) {
    // Runs on GPU 1's current stream, behind the stream that has waited for the value.
    EXPECT_NE(cuda_->current(0).id(), 0) << "a stream of the pool";
    c10::Event read(c10::kCUDA);
    read.record(cuda_->current(0));
    read.block(cuda_->current(1));
    cuda::copy(current(1), tensor::slice_of(there), tensor::slice_of(value));
    return std::vector<at::Tensor>{value, there};
  });
  {
    const c10::StreamGuard on(writing);
    fill(here, 9);
    promise.set(here);
  }
  ASSERT_TRUE(child.done());
  const c10::Stream reading = cuda_->new_stream(1);
  {
    const c10::StreamGuard on(reading);
    const at::Tensor got = child.get().at(1);
    cuda::copy(current(1), tensor::slice_of(seen), tensor::slice_of(got));
  }
  driver_->release(cuda_->view(writing));
  synchronize(cuda_->view(reading));
  EXPECT_EQ(first_byte(seen), 9);
}

TEST_F(CudaFuture, LongChainTakesOneStreamForEachStep) {
  Future<at::Tensor> chain = Future<at::Tensor>::ready(zeros());
  for (int step = 0; step < 20; ++step) {
    const Future<at::Tensor> before = chain;
    const c10::StreamId first = cuda_->new_stream().id();
    chain = before.then([](at::Tensor value) { return value; });
    chain = when_all({before, chain}).then([](std::vector<at::Tensor> values) {
      return values.back();
    });
    EXPECT_EQ(cuda_->new_stream().id() - first - 1, 2) << "in step " << step;
  }
  chain.get();
}

TEST_F(CudaFuture, ContinuationMayMakeAGpuValue) {
  const at::Tensor made = zeros(1);
  const c10::Stream writing = cuda_->new_stream(1);
  driver_->hold(cuda_->view(writing));
  const auto child = [&] {
    const c10::StreamGuard on(writing);
    return Future<int>::ready(4).then([&](int byte) {
      fill(made, static_cast<unsigned char>(byte));
      return made;
    });
  }();
  const c10::Stream reading = cuda_->new_stream(1);
  {
    const c10::StreamGuard on(reading);
    child.wait();
  }
  EXPECT_EQ(driver_->pending(cuda_->view(reading)), 1u);
  driver_->release(cuda_->view(writing));
  synchronize(cuda_->view(reading));
  EXPECT_EQ(first_byte(made), 4);
}

TEST_F(CudaFuture, ValueMayBeChangedOrReplaced) {
  const auto tensors = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{zeros()});
  Promise<std::shared_ptr<std::vector<at::Tensor>>> shared;
  shared.set(tensors);
  tensors->front() = at::Tensor();
  EXPECT_FALSE(shared.future().get()->front().defined());

  at::Tensor tensor = zeros();
  Promise<at::Tensor> promise;
  promise.set(tensor);
  fill(tensor, 3);
  synchronize(current(0));
  EXPECT_EQ(first_byte(promise.future().get()), 3);
  tensor = zeros(1);
  EXPECT_EQ(promise.future().get().device().index(), 0);
}

// Optimizers and functions read the gradients of a backward pass on streams of their own.
TEST_F(CudaFuture, GradientReaderWaitsForItsStream) {
  const c10::Stream writing = cuda_->new_stream(), reading = cuda_->new_stream();
  const auto parameter = cuda_->empty({64}, at::kByte, 0);
  const at::Tensor seen = zeros();
  autograd::Gradients gradients;
  driver_->hold(cuda_->view(writing));
  {
    const c10::StreamGuard on(writing);
    at::Tensor gradient = zeros_enqueued();
    fill(gradient, 7);
    gradients.add(parameter, gradient, 1);
  }
  autograd::Gradients of_context;
  of_context.merge(std::move(gradients));
  {
    const c10::StreamGuard on(reading);
    const at::Tensor* got = of_context.find(parameter);
    ASSERT_NE(got, nullptr);
    cuda::copy(current(0), tensor::slice_of(seen), tensor::slice_of(*got));
  }
  EXPECT_GT(driver_->pending(cuda_->view(reading)), 0u) << "the stream waits, the host went on";
  driver_->release(cuda_->view(writing));
  synchronize(cuda_->view(reading));
  EXPECT_EQ(first_byte(seen), 7);
}

}  // namespace
}  // namespace weft
