// libtorch's side of a GPU, over a FakeDriver: while it lives, c10 finds streams, events and memory
// for CUDA devices, and there are tensors that say they lie on one. There are no kernels: such
// tensors can be named, sliced and sent, not computed with; work on them is enqueued through the
// driver.
//
// One at a time, the first before libtorch has been asked whether it has CUDA, and not where
// libtorch has a real GPU.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>
#include <weft/tests/harness/fake_driver.h>

namespace weft::harness {

class FakeTorchCuda {
 public:
  // Pooled memory is freed in its stream's order, and the driver shares none of it. Shareable
  // memory is what libtorch's allocator takes, which other processes may open.
  enum class Memory { Pooled, Shareable };
  explicit FakeTorchCuda(const FakeDriver& driver, Memory memory = Memory::Pooled);
  ~FakeTorchCuda();
  FakeTorchCuda(const FakeTorchCuda&) = delete;
  FakeTorchCuda& operator=(const FakeTorchCuda&) = delete;

  // An uninitialised, contiguous tensor on a device, allocated for its current stream; the
  // FakeDriver lets the host read and write it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, int device = 0);
  // A stream of libtorch's pool, and the driver's view of any of libtorch's streams.
  c10::Stream new_stream(int device = 0);
  cuda::StreamRef view(const c10::Stream& stream);
  // The stream of a device that is current on this thread.
  c10::Stream current(int device = 0);
  // How often a tensor's memory was reported to libtorch's allocator as used on another stream.
  int recorded_uses() const;

  class Guard;
  class Allocator;

 private:
  std::shared_ptr<Guard> guard_;
  std::shared_ptr<Allocator> allocator_;
};

}  // namespace weft::harness
