// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <weft/base/mutex.h>
#include <weft/cuda/device.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/stream.h>
#include <weft/engine/optim/cuda_steps.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/kernels/cuda_kernels.h>

namespace weft::optim {

namespace {

// The process's devices, for an optimizer that is given none. Never destroyed: kernels that a
// destroyed optimizer has retired are reclaimed by the next optimizer, if there is one.
const std::shared_ptr<tensor::CudaDevices>& machines() {
  static const auto* const devices =
      new std::shared_ptr<tensor::CudaDevices>(std::make_shared<tensor::CudaDevices>());
  return *devices;
}

// The kernels on a device, loaded once. They live until the last optimizer that uses them has been
// destroyed and its retired share reclaimed.
std::shared_ptr<const kernels::CudaKernels> kernels_on(
    const std::shared_ptr<cuda::Device>& device) {
  static Mutex mutex;
  static auto* const loaded WEFT_POINTEE_GUARDED_BY(mutex) =
      new std::map<const cuda::Device*, std::weak_ptr<const kernels::CudaKernels>>();
  MutexLock lock(mutex);
  // Kernels own their device. So the entry of a destroyed device has expired, even if a new device
  // has its address.
  std::erase_if(*loaded, [](const auto& entry) { return entry.second.expired(); });
  auto& known = (*loaded)[device.get()];
  auto kernels = known.lock();
  if (!kernels) known = kernels = std::make_shared<const kernels::CudaKernels>(device);
  return kernels;
}

}  // namespace

struct CudaSteps::OnDevice {
  OnDevice(tensor::CudaDevices& devices, int index)
      : device(devices.open(index)),
        name(c10::kCUDA, static_cast<c10::DeviceIndex>(index)),
        kernels(kernels_on(device)) {
    // Reclaims kernels of earlier optimizers, except those that this one shares now.
    device->retirement().reclaim();
  }

  // The kernels are released when the enqueued steps have run and someone reclaims.
  ~OnDevice() {
    device->retirement().retire(before.end,
                                [kernels = std::move(kernels)]() mutable { kernels.reset(); });
  }

  // The previous step on one stream; the next step follows it, perhaps on another stream.
  struct Before {
    std::optional<c10::Stream> stream;
    Fence end;
    void precede(tensor::CudaDevices& devices, const c10::Stream& next) const {
      if (stream && *stream != next) devices.wait(end, next);
    }
  };

  void follow(tensor::CudaDevices& devices) const {
    const c10::Stream stream = tensor::CudaDevices::current_stream(name);
    before.precede(devices, stream);
    captured.precede(devices, stream);
  }

  template <class F>
  void enqueue(tensor::CudaDevices& devices, F launch) {
    const c10::Stream stream = tensor::CudaDevices::current_stream(name);
    launch(*kernels, cuda::StreamRef{*device, static_cast<CUstream>(stream.native_handle())});
    const Fence end = devices.recorded(stream);
    (tensor::CudaDevices::is_captured(end) ? captured : before) = Before{stream, end};
  }

  std::shared_ptr<cuda::Device> device;
  c10::Device name;
  std::shared_ptr<const kernels::CudaKernels> kernels;
  Before before;    // the last step outside of a capture
  Before captured;  // the last step captured into a CUDA graph; passes when the capture ends
};

CudaSteps::CudaSteps() : CudaSteps(machines()) {}
CudaSteps::CudaSteps(std::shared_ptr<tensor::CudaDevices> devices) : devices_(std::move(devices)) {}
CudaSteps::~CudaSteps() = default;

void CudaSteps::prepare(int device, const char* optimizer, const char* why_once) {
  auto& on = on_[device];
  if (!on || why_once != nullptr) {
    const c10::Device name(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    const char* const why =
        why_once != nullptr ? why_once : "its kernels are not loaded; step once before the capture";
    devices_->refuse_capture(name, optimizer, why);
  }
  if (!on) on = std::make_unique<OnDevice>(*devices_, device);
  on->follow(*devices_);
}

void CudaSteps::sgd(int device, std::span<const kernels::SgdTensor> tensors, Dtype dtype,
                    const kernels::SgdOptions& options) {
  on_.at(device)->enqueue(*devices_,
                          [&](const kernels::CudaKernels& kernels, const cuda::StreamRef& stream) {
                            kernels.sgd_step(tensors, dtype, dtype, options, stream);
                          });
}

void CudaSteps::adamw(int device, std::span<const kernels::AdamWTensor> tensors, Dtype dtype,
                      const kernels::AdamWOptions& options) {
  on_.at(device)->enqueue(*devices_,
                          [&](const kernels::CudaKernels& kernels, const cuda::StreamRef& stream) {
                            kernels.adamw_step(tensors, dtype, dtype, options, stream);
                          });
}

}  // namespace weft::optim
