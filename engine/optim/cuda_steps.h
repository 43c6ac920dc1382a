// Optimizer steps on GPUs: the kernels, loaded for each device that has parameters, on libtorch's
// current stream. The host never waits for a step; steps of one optimizer follow each other also
// where they come on different streams. Used by one thread at a time, as the optimizer is. Kernels
// are loaded once for all that have the same CudaDevices, and unloaded when the last of these is
// gone and the owner of the CudaDevices reclaims; a new one reclaims what former ones have left.
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
  // So many tensors are one launch in any case, where they are of one step (AdamW), or all first
  // steps or none (SGD). More of them may be several, of which the later ones may fail.
  static constexpr std::size_t kTensorsOfALaunch = 628;

  CudaSteps();  // on the machine's GPUs, opened at the first use, once in a process
  explicit CudaSteps(std::shared_ptr<tensor::CudaDevices> devices);
  ~CudaSteps();
  CudaSteps(const CudaSteps&) = delete;
  CudaSteps& operator=(const CudaSteps&) = delete;

  const std::shared_ptr<tensor::CudaDevices>& devices() const { return devices_; }

  // Before each step: the current stream waits for the step before, where that came on another one.
  // Loads the kernels, once for a device, which may block. Throws Unsupported where that cannot be:
  // no GPU of that number, no code for it, a build without CUDA; Caller where the current stream is
  // being captured into a CUDA graph and the kernels are not loaded yet, or there is a reason why
  // the optimizer's next step cannot be repeated (null: none).
  void prepare(int device, const char* optimizer, const char* why_once);
  // Slices lie on the device, which is prepared for its current stream; gradients have the
  // parameters' type. As in kernels.h.
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
