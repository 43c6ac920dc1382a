// SPDX-License-Identifier: Apache-2.0
// Tests how many launches CudaKernels enqueues, of which kernels, and that the host never waits.
// Runs on the fake driver, whose streams the test steps.

#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/kernels/cuda_kernels.h>
#include <weft/kernels/kernel_image.h>
#include <weft/kernels/kernel_list.h>
#include <weft/kernels/segments.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/tests/kernels/fake_kernels.h>

namespace weft::kernels {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CudaLaunch : public cuda::FakeCuda {
 protected:
  CudaLaunch() : FakeCuda({.devices = 2}) {
    define_kernels(fake);
    kernels_ = std::make_unique<CudaKernels>(device);
    stream_ = std::make_unique<cuda::Stream>(*device);
    memory_ = cuda::DeviceMemory(*stream_, 1 << 20);
    fake.run();
    before_ = fake.enqueued().size();
  }

  ~CudaLaunch() override {
    memory_ = {};
    kernels_.reset();
    fake.run();
    EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(60))));
  }

  // Returns `count` tensors of `floats` elements each in the device's memory.
  std::vector<Slice> tensors(std::size_t count, std::size_t floats) const {
    std::vector<Slice> slices;
    for (std::size_t i = 0; i < count; ++i)
      slices.push_back(memory_.slice().part(i * floats * 4, floats * 4));
    return slices;
  }

  // Returns what was enqueued since the previous call.
  std::vector<std::string> enqueued() {
    auto all = fake.enqueued();
    std::vector<std::string> since(all.begin() + static_cast<std::ptrdiff_t>(before_), all.end());
    before_ = all.size();
    return since;
  }

  std::unique_ptr<CudaKernels> kernels_;
  std::unique_ptr<cuda::Stream> stream_;
  cuda::DeviceMemory memory_;
  std::size_t before_ = 0;
};

TEST_F(CudaLaunch, BucketTakesOneLaunch) {
  const Slice flat = memory_.slice().part(512 << 10, 512 << 10);
  kernels_->pack(tensors(20, 50), Dtype::Float32, flat, Dtype::BFloat16, 0.5, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_cast_float32_bfloat16"));
  kernels_->unpack(flat, Dtype::Float16, tensors(1000, 50), Dtype::Float32, 0.5, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_cast_float16_float32_many"));
  kernels_->pack(tensors(20, 50), Dtype::Float32, flat, Dtype::Float32, 1, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_copy_4"));
  kernels_->reduce(flat, flat, Dtype::Bool, ReduceOp::Sum, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_bit_or_uint8"));
}

TEST_F(CudaLaunch, SplitsAtTheParameterLimit) {
  const Slice flat = memory_.slice().part(512 << 10, 512 << 10);
  const std::size_t fit = ManyLaunch<Cast<float, Half>>::kSegments;
  kernels_->pack(tensors(fit, 1), Dtype::Float32, flat, Dtype::Float16, 1, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_cast_float32_float16_many"));
  kernels_->pack(tensors(2 * fit + 1, 1), Dtype::Float32, flat, Dtype::Float16, 1, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_cast_float32_float16_many",
                                      "cuLaunchKernel weft_cast_float32_float16_many",
                                      "cuLaunchKernel weft_cast_float32_float16"));
}

TEST_F(CudaLaunch, EmptyInputLaunchesNothing) {
  const Slice flat = memory_.slice();
  kernels_->pack({}, Dtype::Float32, flat, Dtype::Float16, 1, *stream_);
  kernels_->pack(tensors(3, 0), Dtype::Float32, flat, Dtype::Float16, 1, *stream_);
  kernels_->scale(flat, Dtype::Float32, 1, *stream_);
  kernels_->reduce(Slice(), Slice(), Dtype::Float32, ReduceOp::Sum, *stream_);
  kernels_->sgd_step({}, Dtype::Float32, Dtype::Float32, {}, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre());
}

TEST_F(CudaLaunch, OptimizersGroupTensorsByState) {
  const auto slices = tensors(4, 10);
  std::vector<SgdTensor> sgd;
  std::vector<AdamWTensor> adamw;
  for (int i = 0; i < 6; ++i) {
    sgd.push_back({slices[0], slices[1], slices[2], i % 2 == 0});
    adamw.push_back({slices[0], slices[1], slices[2], slices[3], {}, 1 + i % 3});
  }
  kernels_->sgd_step(sgd, Dtype::Float32, Dtype::Float32, {.momentum = 0.9}, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_sgd_momentum_float32",
                                      "cuLaunchKernel weft_sgd_momentum_float32"));
  kernels_->sgd_step(sgd, Dtype::Float32, Dtype::Float32, {}, *stream_);
  EXPECT_THAT(enqueued(), ElementsAre("cuLaunchKernel weft_sgd_float32"));
  kernels_->adamw_step(adamw, Dtype::Float32, Dtype::Float32, {}, *stream_);
  EXPECT_EQ(enqueued(), std::vector<std::string>(3, "cuLaunchKernel weft_adam_float32"));
}

TEST_F(CudaLaunch, HostNeverWaits) {
  fake.hold(*stream_);
  const int blocks = fake.host_blocks();
  const Slice flat = memory_.slice().part(512 << 10, 512 << 10);
  const auto slices = tensors(1000, 50);
  const AdamWTensor tensor{slices[0], slices[1], slices[2], slices[3], slices[4]};
  kernels_->pack(slices, Dtype::Float32, flat, Dtype::BFloat16, 0.5, *stream_);
  kernels_->reduce(flat, flat, Dtype::BFloat16, ReduceOp::Avg, *stream_);
  kernels_->unpack(flat, Dtype::BFloat16, slices, Dtype::Float32, 1, *stream_);
  kernels_->adamw_step({&tensor, 1}, Dtype::Float32, Dtype::Float32, {.amsgrad = true}, *stream_);
  EXPECT_EQ(fake.pending(*stream_), 4u);
  EXPECT_EQ(fake.host_blocks(), blocks);
  fake.release(*stream_);
  fake.run();
}

TEST_F(CudaLaunch, RefusesBeforeAnythingIsEnqueued) {
  const auto slices = tensors(2, 10);
  std::byte host[40];
  const Slice on_host{host, 40, Device::host()};
  const auto other = cuda::Device::open(fake.driver(), 1);
  const cuda::Stream elsewhere(*other);
  const auto refusal = [](const auto& call) {
    const Error error = cuda::error_from(call);
    EXPECT_EQ(error.blame(), Blame::Caller);
    return error.text();
  };
  EXPECT_THAT(refusal([&] {
                kernels_->reduce(slices[0], on_host, Dtype::Float32, ReduceOp::Sum, *stream_);
              }),
              HasSubstr("the second operand lies on cpu; this call takes memory of cuda:0"));
  EXPECT_THAT(refusal([&] {
                kernels_->reduce(slices[0], slices[1], Dtype::Float32, ReduceOp::BitOr, *stream_);
              }),
              HasSubstr("reduce: BitOr is not defined for float32"));
  EXPECT_THAT(refusal([&] { kernels_->scale(slices[0], Dtype::Float32, 2, elsewhere); }),
              HasSubstr("these kernels are loaded on cuda:0, the stream is of cuda:1"));
  EXPECT_THAT(enqueued(), ElementsAre());
}

#if WEFT_TRACE_ENABLED
class CudaLaunchInATimeline : public cuda::ThreadedCuda {};

TEST_F(CudaLaunchInATimeline, CallIsOneSpanWithAnArrow) {
  constinit static trace::Name gradient{trace::Layer::User, "gradient"};
  define_kernels(fake);
  const CudaKernels kernels(device);
  const cuda::Stream stream(*device);
  const cuda::DeviceMemory memory(stream, 64 << 10);
  const Slice flat = memory.slice().part(0, 32 << 10),
              other = memory.slice().part(32 << 10, 32 << 10);
  std::vector<Slice> many(2 * ManyLaunch<Cast<float, Half>>::kSegments + 1, other.part(0, 4));
  const AdamWTensor tensor{flat, flat, other, other, {}};
  harness::DeviceTimeline timeline;
  {
    const trace::Range range(gradient);
    kernels.pack(many, Dtype::Float32, flat.part(0, many.size() * 2), Dtype::Float16, 1, stream);
  }
  kernels.cast({&flat, 1}, Dtype::Float32, {&other, 1}, Dtype::Float32, 1, stream);
  kernels.adamw_step({&tensor, 1}, Dtype::Float32, Dtype::Float32, {}, stream);
  ASSERT_TRUE(cuda::record(stream).synchronize(Deadline::in(std::chrono::seconds(60))));
  EXPECT_THAT(timeline.names(3), ElementsAre("pack: " + std::to_string(many.size() * 2) + " bytes",
                                             "cast: 32768 bytes", "adamw_step: 32768 bytes"));
  EXPECT_THAT(timeline.arrows(),
              ElementsAre("adamw_step -> adamw_step", "cast -> cast", "gradient > pack -> pack"));
}
#endif

TEST_F(CudaLaunch, DestructorRetiresTheCode) {
  EXPECT_EQ(fake.alive().libraries, 1u);
  kernels_.reset();
  EXPECT_EQ(fake.alive().libraries, 1u);
  EXPECT_EQ(device->retirement().reclaim(), 1u);
  EXPECT_EQ(fake.alive().libraries, 0u);
}

// The driver accepts 4096 bytes of parameters per kernel, and 32764 since CUDA 12.1.
TEST(LaunchParameters, FitTheDriversLimit) {
#define WEFT_EXPECT_FITS(name, ...)                          \
  EXPECT_LE(sizeof(FewLaunch<__VA_ARGS__>), 4096u) << #name; \
  EXPECT_LE(sizeof(ManyLaunch<__VA_ARGS__>), 32764u) << #name;
  WEFT_CAST_KERNELS(WEFT_EXPECT_FITS)
  WEFT_OPTIMIZER_KERNELS(WEFT_EXPECT_FITS)
}

// cuda_kernels.h promises these numbers.
TEST(LaunchParameters, HoldThePromisedNumberOfTensors) {
  EXPECT_EQ((ManyLaunch<Cast<float, BFloat16>>::kSegments), 1168u);
  EXPECT_EQ((ManyLaunch<Sgd<float, float>>::kSegments), 1168u);
  EXPECT_EQ((ManyLaunch<SgdMomentum<double, double>>::kSegments), 908u);
  EXPECT_EQ((ManyLaunch<Adam<float, float>>::kSegments), 742u);
  EXPECT_EQ((ManyLaunch<AdamAmsgrad<double, double>>::kSegments), 628u);
}

TEST(KernelImage, IsAFatbin) {
  const auto image = kernel_image();
  ASSERT_GT(image.size(), 4096u);
  EXPECT_EQ(*reinterpret_cast<const std::uint32_t*>(image.data()), 0xba55ed50u);
}

}  // namespace
}  // namespace weft::kernels
