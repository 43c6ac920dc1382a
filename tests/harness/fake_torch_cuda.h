// SPDX-License-Identifier: Apache-2.0
// libtorch's CUDA interface over a FakeDriver: while it lives, c10 finds streams, events and memory
// for CUDA devices, and tensors can be on them. There are no kernels: such tensors can be named,
// sliced and sent, but not computed with; work on them is enqueued through the driver. There is
// pinned memory, and each GPU has a default generator.
//
// One at a time. Make the first one before libtorch is asked whether it has CUDA, and do not use it
// if libtorch has a real GPU.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>
#include <weft/tests/harness/fake_driver.h>

namespace weft::harness {

class FakeTorchCuda {
 public:
  // Pooled memory is freed in stream order, and the driver does not share it. Shareable memory is
  // the kind that libtorch's allocator uses, and other processes may open it.
  enum class Memory { Pooled, Shareable };
  explicit FakeTorchCuda(const FakeDriver& driver, Memory memory = Memory::Pooled);
  ~FakeTorchCuda();
  FakeTorchCuda(const FakeTorchCuda&) = delete;
  FakeTorchCuda& operator=(const FakeTorchCuda&) = delete;

  // Returns an uninitialised, contiguous tensor on a device, allocated for its current stream. With
  // the FakeDriver the host can read and write it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, int device = 0);
  // new_stream() returns a stream of libtorch's pool, view() the driver's view of any libtorch
  // stream.
  c10::Stream new_stream(int device = 0);
  cuda::StreamRef view(const c10::Stream& stream);
  // Returns the device's current stream on this thread.
  c10::Stream current(int device = 0);
  // Returns how often a tensor's memory was reported to libtorch's allocator as used on another
  // stream.
  int recorded_uses() const;

  class Guard;
  class Allocator;

 private:
  std::shared_ptr<Guard> guard_;
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<c10::Allocator> pinned_;
};

}  // namespace weft::harness
