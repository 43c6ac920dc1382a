// SPDX-License-Identifier: Apache-2.0
// cuda_steps.h for a build without CUDA: every call throws, because no device can be opened.
#include <weft/base/error.h>
#include <weft/engine/optim/cuda_steps.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::optim {

struct CudaSteps::OnDevice {};

CudaSteps::CudaSteps() : CudaSteps(std::make_shared<tensor::CudaDevices>()) {}
CudaSteps::CudaSteps(std::shared_ptr<tensor::CudaDevices> devices) : devices_(std::move(devices)) {}
CudaSteps::~CudaSteps() = default;

void CudaSteps::prepare(int device, const char*, const char*) { devices_->open(device); }
void CudaSteps::sgd(int device, std::span<const kernels::SgdTensor>, Dtype,
                    const kernels::SgdOptions&) {
  devices_->open(device);
}
void CudaSteps::adamw(int device, std::span<const kernels::AdamWTensor>, Dtype,
                      const kernels::AdamWOptions&) {
  devices_->open(device);
}

}  // namespace weft::optim
