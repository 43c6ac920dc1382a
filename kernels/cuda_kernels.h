// SPDX-License-Identifier: Apache-2.0
// The operations of kernels.h on one GPU, in stream order. Nothing here makes the host wait: a call
// checks its arguments, enqueues, and returns. The memory must live until the stream has executed
// the work.
//
// One launch takes as many tensors as its parameter holds (cast, pack and unpack 1168; sgd_step 908
// to 1168, adamw_step 628 to 742). More tensors take more launches, in the same order.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/cuda/device.h>
#include <weft/cuda/library.h>
#include <weft/cuda/stream.h>
#include <weft/kernels/optimizer.h>
#include <weft/kernels/reduce_op.h>

namespace weft::kernels {

// The kernels, loaded on one device. Any thread may use them.
class CudaKernels {
 public:
  // Loads every kernel now, which may block. Otherwise the driver would load each kernel at its
  // first launch and wait for the device, forever if a stream waits for a flag there. Throws
  // Unsupported if there is no code for this GPU.
  explicit CudaKernels(std::shared_ptr<cuda::Device> device);
  // All enqueued work must have run. The code is retired, not unloaded here.
  ~CudaKernels();
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  cuda::Device& device() const { return *device_; }

  // Each as in kernels.h; the slices and the stream must be on this device. Throw Caller, and
  // Device if the context has ended.
  void cast(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to,
            Dtype to_dtype, double scale, const cuda::StreamRef& stream) const;
  void pack(std::span<const Slice> from, Dtype from_dtype, Slice to, Dtype to_dtype, double scale,
            const cuda::StreamRef& stream) const;
  void unpack(Slice from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype, double scale,
              const cuda::StreamRef& stream) const;
  void scale(Slice slice, Dtype dtype, double factor, const cuda::StreamRef& stream) const;
  void reduce(Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op,
              const cuda::StreamRef& stream) const;
  void reduce(Slice into, Slice with, Dtype dtype, ReduceOp op,
              const cuda::StreamRef& stream) const;
  void sgd_step(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                const SgdOptions& options, const cuda::StreamRef& stream) const;
  void adamw_step(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                  const AdamWOptions& options, const cuda::StreamRef& stream) const;

 private:
  class Executor;
  Executor on(const cuda::StreamRef& stream) const;

  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::Library> library_;
  std::vector<cuda::Kernel> kernels_;  // in the order of kernel_list.h
};

}  // namespace weft::kernels
