#include <optional>
#include <utility>

#include <weft/cuda/device.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/stream.h>
#include <weft/engine/optim/cuda_steps.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/kernels/cuda_kernels.h>

namespace weft::optim {

struct CudaSteps::OnDevice {
  OnDevice(tensor::CudaDevices& devices, int index)
      : device(devices.open(index)),
        name(c10::kCUDA, static_cast<c10::DeviceIndex>(index)),
        kernels(std::make_unique<kernels::CudaKernels>(device)) {}

  // The kernels go when what was enqueued has run.
  ~OnDevice() {
    device->retirement().retire(last, [kernels = std::move(kernels)]() mutable { kernels.reset(); });
  }

  template <class F>
  void enqueue(tensor::CudaDevices& devices, F launch) {
    const c10::Stream stream = tensor::CudaDevices::current_stream(name);
    if (before && *before != stream) devices.wait(last, stream);
    launch(*kernels, cuda::StreamRef{*device, static_cast<CUstream>(stream.native_handle())});
    before = stream;
    last = devices.recorded(stream);
  }

  std::shared_ptr<cuda::Device> device;
  c10::Device name;
  std::unique_ptr<kernels::CudaKernels> kernels;
  std::optional<c10::Stream> before;  // that of the step before
  Fence last;                         // its end
};

CudaSteps::CudaSteps() : CudaSteps(std::make_shared<tensor::CudaDevices>()) {}
CudaSteps::CudaSteps(std::shared_ptr<tensor::CudaDevices> devices) : devices_(std::move(devices)) {}
CudaSteps::~CudaSteps() = default;

void CudaSteps::prepare(int device, const char* optimizer, const char* why_once) {
  auto& on = on_[device];
  if (!on || why_once != nullptr) {
    const c10::Device name(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    const char* const why = why_once != nullptr ? why_once : "its kernels are not loaded; step once before the capture";
    devices_->refuse_capture(name, optimizer, why);
  }
  if (!on) on = std::make_unique<OnDevice>(*devices_, device);
}

void CudaSteps::sgd(int device, std::span<const kernels::SgdTensor> tensors, Dtype dtype,
                    const kernels::SgdOptions& options) {
  on_.at(device)->enqueue(*devices_, [&](const kernels::CudaKernels& kernels, const cuda::StreamRef& stream) {
    kernels.sgd_step(tensors, dtype, dtype, options, stream);
  });
}

void CudaSteps::adamw(int device, std::span<const kernels::AdamWTensor> tensors, Dtype dtype,
                      const kernels::AdamWOptions& options) {
  on_.at(device)->enqueue(*devices_, [&](const kernels::CudaKernels& kernels, const cuda::StreamRef& stream) {
    kernels.adamw_step(tensors, dtype, dtype, options, stream);
  });
}

}  // namespace weft::optim
