// SPDX-License-Identifier: Apache-2.0
// Claims that CudaKernels gives the same bits as the CPU implementation. Tested on the fake driver,
// which runs the kernels' own code on the host (cuda_kernels_claims_fake.cc), and on the machine's
// GPU (cuda_kernels_claims_gpu.cc).
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/retire.h>
#include <weft/kernels/cuda_kernels.h>
#include <weft/kernels/kernels.h>
#include <weft/tests/cuda/driver_claims.h>

namespace weft::kernels {

using Bytes = std::vector<std::byte>;

// Returns random values of a type, without NaNs, because a NaN's payload is not defined.
inline Bytes random_values(Dtype dtype, std::size_t elements) {
  static std::mt19937 random(3);
  const bool is_complex = dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64;
  const bool is_double = dtype == Dtype::Float64 || dtype == Dtype::ComplexFloat64;
  const bool is_float = is_complex || is_double || dtype == Dtype::Float32 ||
                        dtype == Dtype::Float16 || dtype == Dtype::BFloat16;
  Bytes bytes(elements * size_of(dtype));
  if (!is_float) {
    for (std::byte& byte : bytes)
      byte = static_cast<std::byte>(dtype == Dtype::Bool ? random() % 2 : random());
    return bytes;
  }
  const std::size_t parts = elements * (is_complex ? 2 : 1);
  std::vector<double> values(parts);
  for (double& value : values)
    value = std::normal_distribution<double>()(random) * (random() % 50 == 0 ? 1e-6 : 1);
  const Slice from{values.data(), parts * sizeof(double), Device::host()};
  const Slice to{bytes.data(), bytes.size(), Device::host()};
  const Dtype part = is_double ? Dtype::Float64 : is_complex ? Dtype::Float32 : dtype;
  cast({&from, 1}, Dtype::Float64, {&to, 1}, part);
  return bytes;
}

// A range of bytes in the fixture's memory.
struct Part {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// Holds host memory and device memory with the same contents. A test runs an operation on the same
// parts of both. Afterwards all bytes must be equal, also those that the operation must leave
// alone.
class CudaKernelsClaims : public testing::TestWithParam<cuda::DriverSource> {
 protected:
  void SetUp() override {
    auto driver = GetParam().open();
    if (!driver.ok()) GTEST_SKIP() << "no GPU: " << driver.error().text();
    device_ = cuda::Device::open(driver.value(), 0);
    kernels_ = std::make_unique<CudaKernels>(device_);
    stream_ = std::make_unique<cuda::Stream>(*device_);
    staging_ = std::make_unique<cuda::PinnedPool>(*device_);
  }

  void TearDown() override {
    if (!device_) return;
    memory_ = {};
    kernels_.reset();
    staging_.reset();
    stream_.reset();
    EXPECT_TRUE(device_->retirement().reclaim_all(Deadline::in(std::chrono::seconds(60))));
  }

  // Adds one array of random values for each number in `elements`. Each array starts `skew`
  // elements off a multiple of 64 bytes, after a gap.
  std::vector<Part> add(Dtype dtype, const std::vector<std::size_t>& elements,
                        std::size_t skew = 0) {
    std::vector<Part> parts;
    for (const std::size_t count : elements) {
      const std::size_t offset = (host_.size() + 64) / 64 * 64 + skew * size_of(dtype);
      const Bytes values = random_values(dtype, count);
      host_.resize(offset);
      host_.insert(host_.end(), values.begin(), values.end());
      parts.push_back({offset, values.size()});
    }
    return parts;
  }

  void upload() {
    host_.resize(host_.size() + 64);
    memory_ = cuda::DeviceMemory(*stream_, host_.size());
    const cuda::PinnedMemory pinned = staging_->allocate(host_.size());
    std::memcpy(pinned.slice().data, host_.data(), host_.size());
    cuda::copy(*stream_, memory_.slice(), pinned.slice());
    synchronize();
  }

  void expect_equal() {
    const cuda::PinnedMemory pinned = staging_->allocate(host_.size());
    cuda::copy(*stream_, pinned.slice(), memory_.slice());
    synchronize();
    const auto* actual = static_cast<const std::byte*>(pinned.slice().data);
    const auto difference = std::mismatch(host_.begin(), host_.end(), actual);
    ASSERT_EQ(difference.first, host_.end())
        << "byte " << difference.first - host_.begin() << " of " << host_.size();
    host_.clear();
  }

  Slice on_host(Part part) { return {host_.data() + part.offset, part.bytes, Device::host()}; }
  Slice on_device(Part part) const { return memory_.slice().part(part.offset, part.bytes); }
  std::vector<Slice> on_host(const std::vector<Part>& parts) {
    std::vector<Slice> slices;
    for (const Part& part : parts) slices.push_back(on_host(part));
    return slices;
  }
  std::vector<Slice> on_device(const std::vector<Part>& parts) const {
    std::vector<Slice> slices;
    for (const Part& part : parts) slices.push_back(on_device(part));
    return slices;
  }

  void check_pack(Dtype from, Dtype to, double scale, const std::vector<std::size_t>& elements,
                  std::size_t skew);
  void check_reduce(ReduceOp op, Dtype dtype, std::size_t elements, std::size_t skew);
  void check_sgd(Dtype dtype, Dtype gradient_dtype, const SgdOptions& options);
  void check_adamw(Dtype dtype, Dtype gradient_dtype, const AdamWOptions& options);

  void synchronize() {
    ASSERT_TRUE(cuda::record(*stream_).synchronize(Deadline::in(std::chrono::seconds(60))));
  }

  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::PinnedPool> staging_;
  std::unique_ptr<cuda::Stream> stream_;
  std::unique_ptr<CudaKernels> kernels_;
  cuda::DeviceMemory memory_;
  Bytes host_;
};

}  // namespace weft::kernels
