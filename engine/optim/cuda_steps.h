// SPDX-License-Identifier: Apache-2.0
// Optimizer steps on GPUs: loads the kernels for each device that has parameters, and launches them
// on libtorch's current stream. The host never waits for a step. Steps of one optimizer follow each
// other even on different streams. One thread at a time uses it, like the optimizer. Kernels are
// loaded once for all CudaSteps with the same CudaDevices. They are unloaded when the last of these
// has been destroyed and the owner of the CudaDevices reclaims; a new CudaSteps reclaims those that
// earlier ones left.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include <weft/base/dtype.h>
#include <weft/kernels/optimizer.h>

namespace weft::tensor {
class CudaDevices;
}

namespace weft::optim {

class CudaSteps {
 public:
  // So many tensors fit into one launch if they are of the same step (AdamW), or if all or none of
  // them take their first step (SGD). More tensors may take several launches, of which later ones
  // may fail.
  static constexpr std::size_t kTensorsOfALaunch = 628;

  CudaSteps();  // on the machine's GPUs, opened once in a process at the first use
  explicit CudaSteps(std::shared_ptr<tensor::CudaDevices> devices);
  ~CudaSteps();
  CudaSteps(const CudaSteps&) = delete;
  CudaSteps& operator=(const CudaSteps&) = delete;

  const std::shared_ptr<tensor::CudaDevices>& devices() const { return devices_; }

  // Called before each step. Makes the current stream wait for the previous step if that was on
  // another stream. Loads the kernels, once for a device, which may block. Throws Unsupported if
  // that fails: no GPU of that number, no code for it, a build without CUDA. While the current
  // stream is captured into a CUDA graph, throws Caller if the kernels are not loaded yet, or if
  // the optimizer's next step cannot be repeated, for the reason `why_once` (null: it can).
  void prepare(int device, const char* optimizer, const char* why_once);
  // Enqueues a step as in kernels.h. Slices lie on the device, which prepare() has prepared for its
  // current stream; gradients have the parameters' type.
  void sgd(int device, std::span<const kernels::SgdTensor> tensors, Dtype dtype,
           const kernels::SgdOptions& options);
  void adamw(int device, std::span<const kernels::AdamWTensor> tensors, Dtype dtype,
             const kernels::AdamWOptions& options);

 private:
  struct OnDevice;
  std::shared_ptr<tensor::CudaDevices> devices_;
  std::map<int, std::unique_ptr<OnDevice>> on_;
};

}  // namespace weft::optim
